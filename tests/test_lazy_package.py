"""Importing the package: its names come when they are asked for, and are the same by every way."""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_fsdp
from tests.support.settling import LIMIT_S
from tests.support.source_tree import SOURCE
from tests.support.train_program import environment

SLOW = ("torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.pipelining", "sympy", "rich")


def loaded_after(code: str, names: tuple[str, ...]) -> list[str]:
    """Which of some modules a new process has imported after this code, beyond what `import torch` brings."""
    before, after = (
        "import json, sys, torch\nbefore = set(sys.modules)",
        "print(json.dumps([*set(sys.modules) - before]))",
    )
    script = f"{before}\n{code}\n{after}"
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=True)
    found = set(json.loads(ended.stdout))
    return [name for name in names if name in found]


def test_nothing_slow_is_imported_before_something_is_sharded() -> None:
    code = "import megatron_fsdp\nmegatron_fsdp.fully_shard, megatron_fsdp.DistributedDataParallelConfig"
    assert loaded_after(code, ("megatron_fsdp.fully_shard", *SLOW)) == ["megatron_fsdp.fully_shard"]
    code = "import sys, megatron_fsdp; print(megatron_fsdp.__version__, 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [megatron_fsdp.__version__, "False"]


_WAYS = """
import importlib, inspect, sys
{first}
import megatron_fsdp
from megatron_fsdp import *
from megatron_fsdp import fully_shard as by_from, utils
submodule = importlib.import_module("megatron_fsdp.fully_shard")
assert inspect.ismodule(submodule) and sys.modules["megatron_fsdp.fully_shard"] is submodule
assert inspect.isfunction(fully_shard)
assert fully_shard is by_from is submodule.fully_shard is megatron_fsdp.fully_shard
for name in ("fully_shard_model", "fully_shard_optimizer", "MixedPrecisionPolicy", "MegatronFSDP"):
    assert getattr(submodule, name) is getattr(megatron_fsdp, name)
assert submodule.MegatronFSDP is MegatronFSDP is megatron_fsdp.megatron_fsdp.MegatronFSDP
assert utils is megatron_fsdp.utils and inspect.ismodule(megatron_fsdp.checkpoint)
"""


def test_every_way_to_a_name_leads_to_the_same_thing() -> None:
    exec(_WAYS.format(first=""), {})


@pytest.mark.full
@pytest.mark.parametrize("first", ["from megatron_fsdp.fully_shard import fully_shard_model", "import torch"])
def test_every_way_to_a_name_leads_to_the_same_thing_in_any_order(first: str) -> None:
    code = _WAYS.format(first=first)
    ended = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_names_can_be_listed_and_pickled() -> None:
    assert set(megatron_fsdp.__all__) <= set(dir(megatron_fsdp))
    for name in megatron_fsdp.__all__:
        found = getattr(megatron_fsdp, name)
        if callable(found):
            assert pickle.loads(pickle.dumps(found)) is found


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    for name in ("fully_shad", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'megatron_fsdp' has no attribute '{name}'"):
            getattr(megatron_fsdp, name)
    with pytest.raises(ImportError, match="cannot import name 'fully_shad' from 'megatron_fsdp'"):
        exec("from megatron_fsdp import fully_shad")


def test_a_submodule_that_lacks_a_library_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import a_library_that_nobody_has\n")
    monkeypatch.setattr(megatron_fsdp, "__path__", [*megatron_fsdp.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        _ = megatron_fsdp.needy


def test_type_checkers_are_told_of_the_same_names_in_the_same_modules() -> None:
    tree = ast.parse((SOURCE / "megatron_fsdp" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    told = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert told == {name: f"megatron_fsdp.{home}" for name, home in megatron_fsdp._HOMES.items()}
    assert set(told) == {name for name in megatron_fsdp.__all__ if not name.startswith("_")}
