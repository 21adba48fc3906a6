"""Tables of exact figures: the bound below a peak, whose copies are whose, and deferred reductions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cli import main
from benchmarks.exact import exact_sections, peak_bound
from benchmarks.operators import MovedModel, engine_copies
from tests.benchmarks.documents import comparison, contender

MIB = 2**20
COUNTED = {"gathers": 2, "reductions": 1, "gather_bytes": 3 * MIB, "reduce_bytes": 2 * MIB}
FLOOR = contender("floor", over={})
FLOOR["live"] |= {"persistent": 24 * MIB, "activations": 5 * MIB}
FSDP2 = contender("fsdp2", over={}, peak=34 * MIB)
OURS = contender("ours-3", over={}, peak=30 * MIB) | {"sent": COUNTED}


def rows(text: str, first: str) -> list[list[str]]:
    """The cells of rows that begin like this."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {first} |")
    ]


def test_shards_and_activations_are_a_bound() -> None:
    document = comparison(FLOOR, OURS, FSDP2)
    assert peak_bound(document) == (12 * MIB, 5 * MIB)
    (text, _) = exact_sections({"large-2": document})
    # 12 + 5 of 34; 0.9 of 34 is 30.6
    assert rows(text, "large-2")[0][1:] == ["12.0", "5.0", "17.0", "34.0", "0.50", "13.6", "30.0", "0.88"]


def test_without_the_floors_activations_there_is_no_bound() -> None:
    assert peak_bound(comparison(contender("floor", over={}))) is None
    assert peak_bound(comparison(OURS)) is None
    assert not any("Room below" in text for text in exact_sections({"large-2": comparison(OURS, FSDP2)}))


def test_copies_are_shown_by_who_makes_them() -> None:
    (text,) = exact_sections({"large-2": comparison(OURS, FSDP2)})
    ours, peer = rows(text, "large-2")
    assert ours[1:] == ["ours-3", "1.00", "0.60", "`engine.gradients` 0.60"]
    assert peer[1:] == ["fsdp2", "1.00", "-", ""]


def test_deferred_reductions_stand_beside_fsdp2s() -> None:
    seen = {**OURS["moved"], "reduced_bytes": 0}
    ours = contender("ours-3-deferred", over={"fsdp2-deferred": 0.5}, peak=30 * MIB, moved=seen) | {"sent": COUNTED}
    peer = contender("fsdp2-deferred", over={}, peak=40 * MIB)
    peer["moved"] |= {"reduced_bytes": 4 * MIB}
    found = exact_sections({"moe-2-accumulation": comparison(ours, peer)})[-1]
    assert rows(found, "moe-2-accumulation")[0][1:] == ["2.0", "4.0", "0.50", "30.0", "40.0", "0.75", "0.50", "0.75"]


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
    command = f"--model tiny --device cpu --steps 1 --warmup 1 {arguments} --out {folder} --name made"
    assert main(command.split()) == 0
    found: dict[str, Any] = json.loads((folder / "made.json").read_text())
    return found


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The engine on two ranks."""
    arguments = "--ranks 2 --strategies 3 --peers"
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
    found = compare(tmp_path, "--ranks 1 --strategies 3 --peers --no-memory")
    for line in found["contenders"]:
        assert (line["live"]["peak"], line["moved"], line["disagrees"]) == (0, None, None)
        assert line["wall_s"]["median"] > 0
        assert line["losses"] == pytest.approx(found["reference_losses"], rel=1e-6)
