import dataclasses
import json
import os
import subprocess
import sys
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.compare import parse
from benchmarks.contenders import (
    DEEPSPEED_HOST,
    FSDP2_MUON,
    OUR_MUON,
    OURS,
    OURS_BY_BUCKETS,
    PEERS,
    UNTRAINED,
    WIRES,
    Setting,
    build_contender,
)
from benchmarks.operators import Moved
from benchmarks.report import LiveBytes, RankReading, RunReading, disagreements, document
from benchmarks.worker import live_host_bytes
from benchmarks.workloads import WORKLOADS, make_batch
from megatron_fsdp import optional_packages
from megatron_fsdp.comm.collectives import Traffic
from megatron_fsdp.errors import ConfigurationError, MissingPackageError
from tests.support.api_net import mesh
from tests.support.on_ranks import on_ranks
from tests.support.source_tree import ROOT, SOURCE

pytestmark = pytest.mark.unmerged
Run = tuple[dict[str, Any], str]


def reading(**losses: tuple[float, float]) -> RunReading:
    """Two ranks, two steps; rank 0 saw the losses given, rank 1 those plus 2; the reference is 3.0 and 2.0."""
    contenders: dict[str, tuple[RankReading, ...]] = {
        name: (
            RankReading((2.0, 4.0), (1.0, 2.0), seen, LiveBytes(10, 30), Traffic(1, 2, 3, 4), 6.0, Moved(7, 8, 9)),
            RankReading((3.0, 1.0), (3.0, 4.0), (seen[0] + 2, seen[1] + 2), LiveBytes(20, 25), None, 6.0),
        )
        for name, seen in losses.items()
    }
    return RunReading(100, (3.0, 2.0), contenders)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of everybody on the tiny model, two microbatches a step: JSON document and output."""
    file = tmp_path_factory.mktemp("results") / "made.json"
    arguments = "--model tiny --ranks 2 --device cpu --steps 2 --warmup 2 --grad-accumulation 2 --bucket-mib 0.05"
    everybody = [*WIRES, *OURS, *OURS_BY_BUCKETS, "ours-3-deferred", *PEERS]
    command = [sys.executable, str(ROOT / "benchmarks" / "compare.py")]
    finished = subprocess.run(
        [*command, *arguments.split(), "--contenders", *everybody, "--out", str(file)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(file.read_text()), finished.stdout


@pytest.mark.full
def test_losses_of_all_that_communicate_are_those_of_one_process(tiny_run: Run) -> None:
    document, printed = tiny_run
    losses = {line["name"]: line["losses"] for line in document["contenders"]}
    assert list(losses) == [*UNTRAINED, *OURS, "mddp", "mddp-optim", "ours-3-deferred", *PEERS]
    assert printed.count("\n| tiny, 2 ranks | ") == 2 * len(losses)  # a table of times and one of costs
    expected = document["reference_losses"]
    assert len(expected) == 4
    assert losses.pop("floor") != pytest.approx(expected, rel=1e-5)
    assert [losses.pop(name) for name in WIRES] == [[0.0] * 4, [0.0] * 4]
    for name, found in losses.items():
        assert found == pytest.approx(expected, rel=1e-6), name


NEEDED = {  # of gradients, and of weights, over a ring: an all-reduce is two, broadcasts of every part are one
    "floor": (0, 0),
    "ours-0": (2, 0),
    "ours-1": (1, 1),
    "ours-2": (2, 1),  # a reduce-scatter after each of two microbatches
    "mddp": (2, 0),
    "mddp-optim": (1, 1),
    "ddp": (2, 0),
    "ddp-views": (2, 0),
    "ddp-zero": (2, 1),
}


@pytest.mark.full
def test_what_is_sent_is_what_the_strategy_needs(tiny_run: Run) -> None:
    lines = {line["name"]: line for line in tiny_run[0]["contenders"]}
    sent, moved = ({name: line[key] for name, line in lines.items()} for key in ("sent", "moved"))
    weights_bytes = 4 * tiny_run[0]["parameter_numel"]
    # Root and three blocks. Strategies 2 and 3 reduce after both microbatches, 0 and 1 once.
    assert [sent[name]["reductions"] for name in (*OURS, "ours-3-deferred")] == [4, 4, 8, 8, 4]
    assert [sent[name]["gathers"] for name in OURS[:3]] == [0, 4, 4]
    assert sent["ours-3"]["gathers"] > 4
    # A bucket is closed at 0.05 MiB of gradients: three are full, and the embeddings are left.
    assert [(sent[name]["reductions"], sent[name]["gathers"]) for name in ("mddp", "mddp-optim")] == [(4, 0), (4, 4)]
    assert {name for name, counted in sent.items() if counted is None} == lines.keys() & {*UNTRAINED, *PEERS}
    for name, parts in NEEDED.items():
        assert moved[name]["sent_bytes"] == moved[name]["gloo_bytes"] == sum(parts) * weights_bytes // 2, name
    for name in (*OURS, "mddp", "mddp-optim"):
        assert moved[name]["sent_bytes"] == sent[name]["gather_bytes"] + sent[name]["reduce_bytes"], name
        # A gather is a broadcast by each of the two ranks.
        assert lines[name]["collectives"] == 2 * sent[name]["gathers"] + sent[name]["reductions"], name
    assert lines["floor"]["collectives"] == 0
    assert 2 <= lines["ddp"]["collectives"] <= 4
    assert lines["ddp-zero"]["collectives"] == lines["ddp"]["collectives"] + 2  # one broadcast by each rank
    reduced = {name: moved[name]["reduced_bytes"] for name in lines}
    # The collectives alone are those of one microbatch.
    assert lines["wire-0"]["collectives"] == lines["ours-0"]["collectives"]
    assert moved["wire-0"] == {**moved["ours-0"], "copied_numel": 0, "copied_by": {}}
    assert lines["wire-3"]["collectives"] < lines["ours-3"]["collectives"]
    assert reduced["wire-3"] == weights_bytes // 2
    assert (reduced["ours-3"], reduced["ours-3-deferred"]) == (weights_bytes, weights_bytes // 2)
    assert reduced["ours-3-deferred"] <= reduced["fsdp2-deferred"] == reduced["fsdp2"] // 2
    # A native reduce-scatter counts twice on gloo: half the model after each of two microbatches.
    native = moved["fsdp2"]["gloo_bytes"] - moved["fsdp2"]["sent_bytes"]
    assert weights_bytes <= native < 1.1 * weights_bytes
    assert moved["ours-3"]["sent_bytes"] < moved["fsdp2"]["sent_bytes"]
    assert moved["fsdp2"]["copied_numel"] - moved["floor"]["copied_numel"] > weights_bytes


def test_deepspeed_takes_no_part_where_it_is_not_installed_or_not_all_is_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optional_packages, "_is_here", lambda _package: False)
    cpu, mesh = torch.device("cpu"), cast(DeviceMesh, None)
    whole, half = (Setting(WORKLOADS["tiny"], dtype, cpu, mesh) for dtype in (torch.float32, torch.bfloat16))
    for setting, error, told in (
        (whole, MissingPackageError, "run pip install deepspeed, or leave it out"),
        (half, ConfigurationError, "is compared in float32 only"),
    ):
        with pytest.raises(error, match=told):
            build_contender(DEEPSPEED_HOST, setting)


def told(one: RunReading) -> dict[str, dict[str, Any]]:
    """The contenders of a document, by name."""
    request, _ = parse(["--device", "cpu", "--contenders", "fsdp2", "ddp"])
    return {each["name"]: each for each in document(one, request, {"date": "today"})["contenders"]}


def test_a_step_takes_as_long_as_its_slowest_rank_and_ratios_are_taken_within_a_round() -> None:
    both = reading(floor=(2.0, 1.0), ddp=(2.0, 1.0))
    slow = tuple(dataclasses.replace(rank, wall_s=(6.0, 16.0), cpu_s=(4.0, 6.0)) for rank in both.contenders["ddp"])
    both.contenders["ddp"] = slow
    floor, ddp = told(both).values()
    assert floor["wall_s"] == {"median": 3.5, "lower": 3.25, "upper": 3.75}  # 3 and 4
    assert floor["cpu_s"] == {"median": 2.5, "lower": 2.25, "upper": 2.75}  # the means, 2 and 3
    assert (floor["live"], floor["losses"]) == ({"persistent": 10, "peak": 30}, (3.0, 2.0))
    assert ddp["wall_over"]["floor"] == {"median": 3.0, "lower": 2.5, "upper": 3.5}  # 6 / 3 and 16 / 4
    assert ddp["cpu_over"]["floor"]["median"] == 2.0
    assert ddp["wall_over"].keys() == {"floor", "ddp"}  # fsdp2 was not there


def test_wrong_losses_are_named_and_the_floor_is_left_out() -> None:
    found = disagreements(reading(floor=(9.0, 9.0), ddp=(2.0, 1.0), fsdp2=(2.0, 1.001)), 1e-6)
    assert list(found) == ["fsdp2"]
    assert found["fsdp2"].startswith("loss 2.001 at step 1, one process on the whole batch has 2")


# ---- the contenders that step Muon train alike -----------------------------------------------------------------------


@on_ranks(2)
def test_both_muons_train_alike() -> None:
    cpu = torch.device("cpu")
    setting = Setting(WORKLOADS["tiny"], torch.float32, cpu, mesh(), comm_dtype=torch.float32)
    batches = [make_batch(setting.workload, cpu, 2 * step + dist.get_rank()) for step in range(3)]
    jobs = [build_contender(name, setting) for name in (OUR_MUON, FSDP2_MUON)]
    ours, gathered = ([job.step([batch]).item() for batch in batches] for job in jobs)
    assert ours == pytest.approx(gathered, rel=1e-4)
    assert len(set(ours)) == 3


@on_ranks(1)
def test_live_bytes_are_of_what_is_built_and_of_the_most_that_an_act_adds() -> None:
    megabyte = 2**20

    def act(built: torch.Tensor) -> None:
        for megabytes in (3, 8, 2):
            torch.empty(megabytes * megabyte, dtype=torch.uint8).fill_(1)
        built.add_(1)

    found = live_host_bytes(lambda: torch.zeros(5 * megabyte, dtype=torch.uint8), act, lambda _: 7)
    assert found.persistent == 5 * megabyte + 7
    assert found.peak - found.persistent == pytest.approx(8 * megabyte, abs=megabyte / 4)
