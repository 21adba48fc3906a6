import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.compare import parse, tokens_per_rank
from benchmarks.contenders import OURS, OURS_BY_BUCKETS, PEERS
from benchmarks.operators import Moved
from benchmarks.page import comparison_table, notes
from benchmarks.report import (
    LiveBytes,
    RankReading,
    RunReading,
    SentPerStep,
    Spread,
    disagreements,
    document,
    needed_bytes,
    summarise,
)
from benchmarks.worker import turns
from tests.support.source_tree import ROOT, SOURCE

TENSORS = 3 * 20 + 5

Run = tuple[dict[str, Any], str]


def reading(**losses: tuple[float, float]) -> RunReading:
    """Two ranks, two steps; rank 0 saw the losses given, rank 1 those plus 2; the reference is 3.0 and 2.0."""
    contenders: dict[str, tuple[RankReading, ...]] = {
        name: (
            RankReading(
                (2.0, 4.0), (1.0, 2.0), seen, LiveBytes(10, 30), SentPerStep(1, 2, 3, 4), 6.0, Moved(6, 7, 8, 9, 1)
            ),
            RankReading((3.0, 1.0), (3.0, 4.0), (seen[0] + 2, seen[1] + 2), LiveBytes(20, 25), None, 6.0),
        )
        for name, seen in losses.items()
    }
    return RunReading(100, 5, (3.0, 2.0), contenders)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of everybody on the tiny model, two microbatches a step: JSON document and output."""
    file = tmp_path_factory.mktemp("results") / "made.json"
    arguments = "--model tiny --ranks 2 --device cpu --steps 2 --warmup 2 --grad-accumulation 2 --bucket-mib 0.05"
    everybody = [*OURS, *OURS_BY_BUCKETS, "ours-3-deferred", *PEERS]
    finished = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "compare.py"),
            *arguments.split(),
            "--contenders",
            *everybody,
            "--out",
            str(file),
        ],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(file.read_text()), finished.stdout


@pytest.fixture
def lines(tiny_run: Run) -> dict[str, dict[str, Any]]:
    """The contenders of the tiny run by name."""
    return {line["name"]: line for line in tiny_run[0]["contenders"]}


@pytest.mark.full
def test_everybody_takes_part_in_the_order_of_the_table(tiny_run: Run, lines: dict[str, dict[str, Any]]) -> None:
    assert list(lines) == ["floor", *OURS, "mddp", "mddp-optim", "ours-3-deferred", *PEERS]
    assert tiny_run[1].count("\n| tiny, 2 ranks | ") == 2 * len(lines)  # a table of times and one of costs


@pytest.mark.full
def test_losses_of_all_that_communicate_are_those_of_one_process(
    tiny_run: Run, lines: dict[str, dict[str, Any]]
) -> None:
    expected = tiny_run[0]["reference_losses"]
    assert len(expected) == 4
    for name in lines.keys() - {"floor"}:
        assert lines[name]["losses"] == pytest.approx(expected, rel=1e-6), name


@pytest.mark.full
def test_losses_tell_a_contender_that_does_not_communicate(tiny_run: Run, lines: dict[str, dict[str, Any]]) -> None:
    assert lines["floor"]["losses"] != pytest.approx(tiny_run[0]["reference_losses"], rel=1e-5)


@pytest.mark.full
def test_collectives_of_a_step_are_those_of_the_strategy(lines: dict[str, dict[str, Any]]) -> None:
    sent = {name: line["sent"] for name, line in lines.items()}
    # Root and three blocks. Strategies 2 and 3 reduce after both microbatches, 0 and 1 once.
    assert [sent[f"ours-{i}"]["reductions"] for i in range(4)] == [4, 4, 8, 8]
    assert [sent[f"ours-{i}"]["gathers"] for i in range(3)] == [0, 4, 4]
    assert sent["ours-3"]["gathers"] > 4
    assert {name for name, counted in sent.items() if counted is None} == lines.keys() & {"floor", *PEERS}


@pytest.mark.full
def test_buckets_send_what_the_algorithm_needs(tiny_run: Run, lines: dict[str, dict[str, Any]]) -> None:
    weights_bytes = 4 * tiny_run[0]["parameter_numel"]
    replicated, sharded = lines["mddp"], lines["mddp-optim"]
    # A bucket is closed at 0.05 MiB of gradients: three are full, and the embeddings are left.
    assert (replicated["sent"]["reductions"], replicated["sent"]["gathers"]) == (4, 0)
    assert (sharded["sent"]["reductions"], sharded["sent"]["gathers"]) == (4, 4)
    for line in (replicated, sharded):
        assert line["sent"]["reduce_bytes"] + line["sent"]["gather_bytes"] == line["needed_bytes"] == weights_bytes


@pytest.mark.full
def test_what_is_seen_on_the_wire_is_what_is_needed(lines: dict[str, dict[str, Any]]) -> None:
    for name in ("floor", "ours-0", "ours-1", "ours-2", "mddp", "mddp-optim", "ddp", "ddp-zero"):
        moved = lines[name]["moved"]
        assert moved["sent_bytes"] == moved["gloo_bytes"] == lines[name]["needed_bytes"], name
    ours = lines["ours-3"]
    assert ours["moved"]["sent_bytes"] == ours["sent"]["gather_bytes"] + ours["sent"]["reduce_bytes"]


@pytest.mark.full
def test_what_is_deferred_is_reduced_once(tiny_run: Run, lines: dict[str, dict[str, Any]]) -> None:
    weights_bytes = 4 * tiny_run[0]["parameter_numel"]
    reduced = {name: lines[name]["moved"]["reduced_bytes"] for name in lines}
    assert (lines["ours-3"]["sent"]["reductions"], lines["ours-3-deferred"]["sent"]["reductions"]) == (8, 4)
    assert (reduced["ours-3"], reduced["ours-3-deferred"]) == (weights_bytes, weights_bytes // 2)
    assert reduced["ours-3-deferred"] <= reduced["fsdp2-deferred"] == reduced["fsdp2"] // 2


@pytest.mark.full
def test_native_reduce_scatters_count_twice_on_gloo(tiny_run: Run, lines: dict[str, dict[str, Any]]) -> None:
    weights_bytes = 4 * tiny_run[0]["parameter_numel"]
    moved = lines["fsdp2"]["moved"]
    reduced = moved["gloo_bytes"] - moved["sent_bytes"]
    assert weights_bytes <= reduced < 1.1 * weights_bytes  # half the model after each of two microbatches
    assert lines["ours-3"]["moved"]["sent_bytes"] < lines["fsdp2"]["moved"]["sent_bytes"]


@pytest.mark.full
def test_allocations_and_copies_of_a_step_are_counted(tiny_run: Run, lines: dict[str, dict[str, Any]]) -> None:
    numel = tiny_run[0]["parameter_numel"]
    floor = lines["floor"]
    assert floor["live"]["allocations"] > 2 * TENSORS
    assert floor["live"]["allocated"] > 2 * 4 * numel  # gradients of two microbatches
    copied = {name: line["moved"]["copied_numel"] - floor["moved"]["copied_numel"] for name, line in lines.items()}
    assert copied["fsdp2"] > 4 * numel


@pytest.mark.full
def test_collectives_of_all_are_counted_by_the_process_groups(lines: dict[str, dict[str, Any]]) -> None:
    assert lines["floor"]["collectives"] == 0
    for line in lines.values():
        if line["sent"] is not None:
            assert line["collectives"] == line["sent"]["gathers"] + line["sent"]["reductions"]
    buckets = lines["ddp"]["collectives"]
    assert 2 <= buckets <= 4
    assert lines["ddp-zero"]["collectives"] == buckets + 2  # one broadcast by each rank


@pytest.mark.full
def test_memory_between_steps_holds_weights_and_optimizer_state(
    tiny_run: Run, lines: dict[str, dict[str, Any]]
) -> None:
    document = tiny_run[0]
    assert document["parameter_tensors"] == TENSORS
    weights_bytes = 4 * document["parameter_numel"]
    steps_bytes = 4 * TENSORS  # the optimizer's step counters
    assert lines["floor"]["live"]["persistent"] == 3 * weights_bytes + steps_bytes
    for line in lines.values():
        assert line["live"]["peak"] > line["live"]["persistent"] > weights_bytes


def test_turns_rotate_and_reverse() -> None:
    assert [turns(3, index) for index in range(4)] == [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]]


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    (line,) = summarise(reading(floor=(2.0, 1.0)), ())
    assert line.wall_s == Spread(3.5, 3.25, 3.75)  # 3 and 4
    assert line.cpu_s == Spread(2.5, 2.25, 2.75)  # the means, 2 and 3
    assert line.live == LiveBytes(10, 30)
    assert line.losses == (3.0, 2.0)


def test_ratios_are_taken_within_a_round() -> None:
    both = reading(floor=(2.0, 1.0), ddp=(2.0, 1.0))
    slow = tuple(dataclasses.replace(rank, wall_s=(6.0, 16.0), cpu_s=(4.0, 6.0)) for rank in both.contenders["ddp"])
    both.contenders["ddp"] = slow
    line = summarise(both, ("floor", "fsdp2"))[1]
    assert line.wall_over == {"floor": Spread(3.0, 2.5, 3.5)}  # 6 / 3 and 16 / 4; fsdp2 was not there
    assert line.cpu_over == {"floor": Spread(2.0, 2.0, 2.0)}


def test_wrong_losses_are_named_and_the_floor_is_left_out() -> None:
    found = disagreements(reading(floor=(9.0, 9.0), ddp=(2.0, 1.0), fsdp2=(2.0, 1.001)), 1e-6)
    assert list(found) == ["fsdp2"]
    assert found["fsdp2"].startswith("loss 2.001 at step 1, one process on the whole batch has 2")


def test_who_disagrees_is_shown_without_speeds() -> None:
    request, _ = parse(["--device", "cpu"])
    one = reading(floor=(2.0, 1.0), ddp=(2.0, 1.0), fsdp2=(2.0, 1.001))
    one.absent["ddp-zero"] = "not here"
    told = summarise(one, ("floor", "fsdp2"))
    found = document(told, request, one, {"date": "today"})
    by_name = {each["name"]: each for each in found["contenders"]}
    assert by_name["fsdp2"]["wall_s"] is None
    assert by_name["fsdp2"]["wall_over"] == {}
    assert list(by_name["ddp"]["wall_over"]) == ["floor"]
    rows = [line for line in comparison_table({"run": found}).splitlines() if line.startswith("| run | fsdp2")]
    assert rows[0] == "| run | fsdp2 | - | - | - | - | - | - |"
    assert rows[1].startswith("| run | fsdp2 | 0.0 | 0.0 | 1.00 |")
    assert notes({"run": found}).splitlines() == [
        f"- run, fsdp2: no speed, since {by_name['fsdp2']['disagrees']}",
        "- ddp-zero took no part in run: not here",
    ]


def test_nan_is_not_agreement() -> None:
    assert len(disagreements(reading(ddp=(float("nan"), 1.0)), 1e-6)) == 1


@pytest.mark.parametrize(
    ("name", "parts"),
    [("floor", 0), ("mddp", 2), ("ddp", 2), ("ours-1", 2), ("mddp-optim", 2), ("ddp-zero", 3), ("ours-2", 4)],
)
def test_needed_bytes_are_parts_of_the_model(name: str, parts: int) -> None:
    request, _ = parse(["--ranks", "4", "--device", "cpu", "--grad-accumulation", "3", "--dtype", "bfloat16"])
    assert needed_bytes(name, request, reading()) == parts * 150  # three quarters of 100 elements of 2 bytes


@pytest.mark.parametrize(("name", "needed"), [("ddp", 300), ("ours-1", 150 + 300), ("ours-2", 3 * 150 + 300)])
def test_gradients_may_travel_in_another_dtype(name: str, needed: int) -> None:
    request, _ = parse(["--ranks", "4", "--device", "cpu", "--grad-accumulation", "3", "--comm-dtype", "bfloat16"])
    assert needed_bytes(name, request, reading()) == needed


def test_tokens_of_a_rank_are_those_of_all_its_microbatches() -> None:
    assert tokens_per_rank(parse(["--model", "tiny", "--device", "cpu", "--grad-accumulation", "3"])[0]) == 3 * 2 * 8


@pytest.mark.parametrize("name", ["ours-3", "fsdp2"])
def test_needed_bytes_are_not_known_where_weights_may_stay_gathered(name: str) -> None:
    request, _ = parse(["--device", "cpu"])
    assert needed_bytes(name, request, reading()) is None


@pytest.mark.parametrize(
    "arguments",
    [
        "--steps 0",
        "--contenders horovod",
        "--dtype float8",
        "--bucket-mib 0",
    ],
)
def test_impossible_arguments_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(arguments.split())
    assert stopped.value.code == 2
    assert arguments.split()[0] in capsys.readouterr().err
