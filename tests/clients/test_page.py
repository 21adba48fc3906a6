"""The programs of docs/integrations.md about clients run as printed, one after another, on two ranks."""

import re
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.clients.test_accelerate import forget_accelerate, started
from tests.conftest import RunRanks
from tests.support.source_tree import ROOT

for package in ("accelerate", "lightning", "peft", "transformers"):
    pytest.importorskip(package)


def programs() -> dict[str, str]:
    """Code by the heading of its section."""
    clients = (ROOT / "docs/integrations.md").read_text().partition("\n## The wrapper in ")[2]
    sections = re.split(r"^###? ", clients, flags=re.MULTILINE)
    found = {
        text.splitlines()[0]: re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) for text in sections
    }
    return {heading: "\n".join(blocks) for heading, blocks in found.items() if blocks}


def run_page(folder: str) -> None:
    given = {
        "folder": folder,
        "backend": "gloo",
        "hardware": {"accelerator": "cpu", "devices": dist.get_world_size()},
    }
    with warnings.catch_warnings(), started():
        warnings.simplefilter("ignore")  # the clients warn of workers of loaders and of settings that they replace
        for heading, program in programs().items():
            forget_accelerate()
            exec(compile(program, heading, "exec", dont_inherit=True), given)
    given.clear()  # caches of torch keep the programs' classes, and with them all names beside them


def test_programs_run_as_printed(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert len(programs()) == 4
    run_ranks(2, run_page, str(tmp_path), timeout_s=300.0)
    assert (tmp_path / "last.ckpt" / ".metadata").is_file()
