"""What is counted exactly: whose copies are whose, and what a run on the tiny model holds and computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.compare import main
from benchmarks.operators import MovedModel, engine_copies


def test_copies_belong_to_the_innermost_module_that_is_not_torchs() -> None:
    code = "def copy(of):\n    return of.clone()\n"
    modules = {name: {"__name__": name} for name in ("megatron_fsdp.engine.some", "somebody")}
    for scope in modules.values():
        exec(code, scope)
    tensor = torch.ones(3)
    with MovedModel(2) as counted:
        for scope in modules.values():
            scope["copy"](tensor)
        torch.nn.utils.parameters_to_vector([tensor, tensor])  # inside of torch: this test has asked for it
    copied = counted.moved.copied_by
    assert copied == {**dict.fromkeys(modules, 3), __name__: 6}
    assert sum(copied.values()) == counted.moved.copied_numel
    assert engine_copies(copied) == 3


def compare(folder: Path, arguments: str) -> dict[str, Any]:
    """The document of a run on the tiny model; its ranks are processes of their own."""
    command = f"--model tiny --device cpu --steps 1 --warmup 1 {arguments} --out {folder}/made.json"
    assert main(command.split()) == 0
    found: dict[str, Any] = json.loads((folder / "made.json").read_text())
    return found


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The engine on two ranks."""
    arguments = "--ranks 2 --contenders ours-3"
    return compare(tmp_path_factory.mktemp("results"), arguments)


@pytest.mark.full
def test_activations_of_the_floor_are_what_its_forward_leaves(tiny_run: dict[str, Any]) -> None:
    """At least the logits, their float32 log-probabilities and every block's wide activations; not the gradients."""
    (live,) = (line["live"] for line in tiny_run["contenders"] if line["name"] == "floor")
    tokens, width, vocabulary, blocks = 2 * 8, 32, 64, 3
    kept = 4 * tokens * (vocabulary + blocks * (2 * 4 + 6) * width)  # before and after GELU, and six of width
    assert kept < live["activations"] < 3 * kept
    assert live["persistent"] + live["activations"] < live["peak"] + 4 * tokens * vocabulary
    weights_bytes = 4 * tiny_run["parameter_numel"]
    assert live["persistent"] == pytest.approx(3 * weights_bytes, rel=0.01)


@pytest.mark.full
def test_losses_of_the_engine_are_those_of_one_process_and_of_the_floor_are_not(tiny_run: dict[str, Any]) -> None:
    losses = {line["name"]: line["losses"] for line in tiny_run["contenders"]}
    assert losses["ours-3"] == pytest.approx(tiny_run["reference_losses"], rel=1e-6)
    assert losses["floor"] != pytest.approx(tiny_run["reference_losses"], rel=1e-5)


@pytest.mark.full
def test_without_memory_steps_are_timed_all_the_same(tmp_path: Path) -> None:
    found = compare(tmp_path, "--ranks 1 --contenders ours-3 --no-memory")
    for line in found["contenders"]:
        assert (line["live"]["peak"], line["moved"], line["disagrees"]) == (0, None, None)
        assert line["wall_s"]["median"] > 0
        assert line["losses"] == pytest.approx(found["reference_losses"], rel=1e-6)
