"""The README and the pages: what is printed runs, in new processes, and every link leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT
from tests.support.train_program import environment

_BLOCK = re.compile(r"^```python(?: title=\"(?P<title>[\w.]+)\")?\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_LOSS = re.compile(r"(\d+)(?:: loss)? ([\d.]+)$", re.MULTILINE)
_AT_EXIT = "terminate called without an active exception"
"""What torch 2.13 over gloo ends with now and then, after a program's last line; FSDP2's programs do so as often."""
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))


def run(folder: Path, ranks: int, *program: str) -> str:
    """Run a program in a folder, by torchrun where there are ranks; returns what it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, *program]
    ended = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 or _AT_EXIT in ended.stderr, ended.stderr[-2000:]
    return ended.stdout


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in _LOSS.findall(printed)}


def test_the_first_program_of_the_readme_trains_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    first = _BLOCK.search((ROOT / "README.md").read_text())
    assert first is not None
    (tmp_path / "train.py").write_text(first["code"])
    one, two = (losses(run(tmp_path, ranks, "train.py")) for ranks in (1, 2))
    assert list(one) == list(range(10))
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.full
def test_the_programs_of_the_tutorial_run_one_after_another(tmp_path: Path) -> None:
    for block in _BLOCK.finditer((ROOT / "docs" / "tutorial.md").read_text()):
        (tmp_path / block["title"]).write_text(block["code"])
    plain = losses(run(tmp_path, 0, "plain.py"))
    assert list(plain) == [10, 20]
    assert losses(run(tmp_path, 2, "sharded.py")) == pytest.approx(plain, rel=1e-3)
    at_once = losses(run(tmp_path, 1, "resumable.py", "40"))
    (tmp_path / "runs").rename(tmp_path / "at_once")
    begun, gone_on = run(tmp_path, 2, "resumable.py", "20"), run(tmp_path, 3, "resumable.py", "40")
    assert list(losses(gone_on)) == [30, 40]
    assert losses(begun) | losses(gone_on) == pytest.approx(at_once, rel=1e-3)
    assert "loaded 67073 parameters" in run(tmp_path, 0, "load.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = [target.split("#")[0] for target in _LINK.findall(page.read_text())]
    local = [target for target in targets if target and "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize(
    ("summary", "warnings"), [("Megatron-FSDP by NVIDIA", 1), ("an independent implementation", 0)]
)
def test_the_other_distribution_of_the_same_import_name_is_warned_of_once(
    tmp_path: Path, summary: str, warnings: int
) -> None:
    other = tmp_path / "megatron_fsdp-0.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-fsdp\nVersion: 0.9\nSummary: {summary}\n")
    (tmp_path / "twice.py").write_text(
        "import sys, warnings\n"
        "sys.path.insert(0, '.')\n"
        "from torch import nn\n"
        "from megatron_fsdp import fully_shard_model\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            fully_shard_model(nn.Linear(2, 2), zero_dp_strategy=9)\n"
        "        except ValueError:\n"
        "            pass\n"
        "print(sum('beside mfsdp' in str(each.message) for each in caught))\n"
    )
    assert run(tmp_path, 0, "twice.py").split() == [str(warnings)]
