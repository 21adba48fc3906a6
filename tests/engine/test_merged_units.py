"""Small neighbouring units that are merged: which ones, in how many messages, and with the results of one process."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.config.engine_options import MemoryOptions
from megatron_fsdp.sharding.units import (
    MergeLimit,
    UnitPlan,
    UnitSpec,
    find_units,
    merge_limit,
    merge_small_units,
    plan_units,
)
from tests.conftest import RunRanks
from tests.engine.test_skipped_units import Skips
from tests.support.arrangements import Arrangement
from tests.support.case import (
    FP32,
    ONE_RANK,
    Run,
    Scenario,
    Setting,
    accumulate,
    adamw_above_noise,
    check_jobs,
    shard,
    three_steps,
)
from tests.support.on_ranks import engine_of, on_ranks, refusal
from tests.support.zoo import FEATURES, Layer, ModelCase, NeighbourCallers, Ordered, Penalised, Recomputed, vector_case

pytestmark = pytest.mark.unmerged

LAYER_BYTES = sum(param.nbytes for param in Layer().parameters())
ALL = str(9 * LAYER_BYTES)
MIB = 2**20
Sharded = tuple[MegatronFSDP, torch.optim.Optimizer]

# ---- which units are merged: pure --------------------------------------------------------------------------------


def names(plan: UnitPlan) -> list[str]:
    return [unit.name for unit in plan.units]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, ["", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4"]),
        (3, ["", "layers.0..1", "layers.2..4"]),  # even parts, of three at most
        (9, ["", "layers.0..4"]),
    ],
)
def test_a_run_is_cut_into_as_few_even_parts_as_the_limit_allows(limit: int, expected: list[str]) -> None:
    sizes = [10, *[LAYER_BYTES] * 5]
    plan = merge_small_units(find_units(Ordered(layers=5), [Layer]), sizes, MergeLimit(*[limit * LAYER_BYTES] * 2))
    assert names(plan) == expected
    paths = [path for unit in plan.units[1:] for path in unit.modules]
    assert paths == [f"layers.{k}" for k in range(5)]
    assert [name for unit in plan.units[1:] for name in unit.parameters] == [
        f"{path}.{linear}.{kind}" for path in paths for linear in ("up", "down") for kind in ("weight", "bias")
    ]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ((1, 1), [1] * 40),
        ((2, 1), [*[2] * 16, *[1] * 8]),
        ((9, 1), [1, *[3] * 5, *[2] * 8, *[1] * 8]),
        ((9, 2), [1, *[3] * 5, *[2] * 8]),  # as a large head allows
    ],
)
def test_the_units_that_a_backward_begins_with_are_short(limit: tuple[int, int], expected: list[int]) -> None:
    count = sum(expected)
    plan = merge_small_units(find_units(Ordered(layers=count), [Layer]), [1] * (count + 1), MergeLimit(*limit))
    assert [len(unit.modules) for unit in plan.units[1:]] == expected
    assert [path for unit in plan.units[1:] for path in unit.modules] == [f"layers.{k}" for k in range(count)]


def test_only_the_last_units_of_the_whole_model_are_short() -> None:
    lists = [UnitSpec.of_module(f"{name}.{k}", (f"{name}.{k}.w",), "Layer") for name in "ab" for k in range(9)]
    both = UnitPlan((UnitSpec.of_module("", (), "Net"), *lists), "given", ())
    plan = merge_small_units(both, [1] * 19, MergeLimit(4, 1))
    assert [unit.name for unit in plan.units[1:7]] == ["a.0", "a.1..2", "a.3..4", "a.5..6", "a.7..8", "b.0"]
    assert len(plan.units) == 1 + 5 + 9


def test_the_largest_of_a_run_says_how_many_are_merged() -> None:
    plan = merge_small_units(find_units(Ordered(layers=3), [Layer]), [0, 1, 1, 3], MergeLimit(6, 6))
    assert names(plan) == ["", "layers.0", "layers.1..2"]


def test_only_numbered_neighbours_of_one_class_in_one_list_are_merged() -> None:
    described = [
        ("", "Net", False),
        ("first", "Layer", False),
        ("second", "Layer", False),
        ("a.0", "Layer", False),
        ("a.1", "Layer", False),
        ("a.3", "Layer", False),
        ("b.4", "Layer", False),
        ("b.5", "Other", False),
        ("b.6", "Other", False),
        ("b.7", "Other", True),
    ]
    units = tuple(UnitSpec.of_module(name, (f"{name}.w",), kind, is_end=end) for name, kind, end in described)
    merged = merge_small_units(UnitPlan(units, "given", ()), [1] * len(units), MergeLimit(100, 100))
    assert names(merged) == ["", "first", "second", "a.0..1", "a.3", "b.4", "b.5..6", "b.7"]
    assert merged.units[3].class_name == "Layer"
    assert (merged.source, merged.aliases) == ("given", ())


@pytest.mark.parametrize(
    ("unit_bytes", "num_ranks", "num_shards", "expected"),
    [
        ([0, 100, 100], 1, 1, (0, 0)),  # nothing is sent
        ([256 * MIB, MIB], 2, 2, (4 * MIB, MIB)),
        ([46 * MIB, MIB, MIB], 2, 2, (3 * MIB, MIB)),  # an eighth of what a rank keeps
        ([46 * MIB, MIB, MIB], 8, 2, (3 * MIB, MIB)),
        ([0, 30 * MIB, 2 * MIB], 16, 16, (16 * MIB, 16 * MIB)),
        ([0, 30 * MIB, 2 * MIB], 64, 64, (30 * MIB, 30 * MIB)),  # as large as slots and buckets are anyway
        ([46 * MIB, MIB, MIB], 8, 1, (25 * MIB, 25 * MIB)),  # whole weights
    ],
)
def test_the_size_of_a_message_grows_with_the_ranks_while_that_costs_little_memory(
    unit_bytes: list[int], num_ranks: int, num_shards: int, expected: tuple[int, int]
) -> None:
    assert merge_limit(unit_bytes, num_ranks, num_shards) == expected


@pytest.mark.parametrize(
    ("numel", "message", "expected"),
    [
        (None, None, ["", *(f"layers.{k}" for k in range(20))]),  # an eighth of the half that a rank keeps is one layer
        (10 * LAYER_BYTES // 4, None, ["", "layers.0..9", "layers.10..19"]),
        (10 * LAYER_BYTES // 4, 0, ["", *(f"layers.{k}" for k in range(20))]),
    ],
)
def test_options_say_how_much_is_merged(numel: int | None, message: int | None, expected: list[str]) -> None:
    memory, model = MemoryOptions(communication_unit_numel=numel, message_bytes=message), Ordered(layers=20)
    assert names(plan_units(model, [Layer], memory, 2, 2, shapes_are_alike=True)) == expected
    each = ["", *(f"layers.{k}" for k in range(20))]
    assert names(plan_units(model, [Layer], memory, 2, 2, shapes_are_alike=False)) == each
    finer = plan_units(model, [Layer], replace(memory, fine_grained=True), 2, 2, shapes_are_alike=True)
    assert len(finer.units) == 41


class _Language(nn.Module):
    """An embedding of `rows` x 128 floats, two small blocks and a head of 32,768 x 128 (16 MiB)."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))
        self.head = nn.Linear(128, 32768)


@pytest.mark.parametrize(
    ("rows", "num_ranks", "num_shards", "ends"),
    [
        (8192, 2, 1, ["embed", "head"]),  # 4 MiB
        (8191, 2, 1, ["head"]),  # its message would be a short one
        (8191, 2, 2, ["embed", "head"]),  # memory of gathered weights counts
        (8191, 1, 1, ["embed", "head"]),  # nothing is sent
    ],
)
def test_small_ends_stay_in_the_root_where_weights_stay_whole(
    rows: int, num_ranks: int, num_shards: int, ends: list[str]
) -> None:
    with torch.device("meta"):
        model = _Language(rows)
    plan = plan_units(model, None, MemoryOptions(), num_ranks, num_shards, shapes_are_alike=True)
    assert [unit.name for unit in plan.units if unit.is_end] == ends
    assert ("embed.weight" in plan.units[0].parameters) == ("embed" not in ends)


# ---- against one process -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merged:
    """A setting in which units of up to so many layers are merged."""

    layers: int
    setting: Setting = field(default_factory=lambda: Setting(3))

    @property
    def arrangement(self) -> Arrangement:
        return self.setting.arrangement

    def shard(self, scenario: Scenario, model: nn.Module) -> Sharded:
        os.environ["MFSDP_MESSAGE_BYTES"] = str(self.layers * LAYER_BYTES)
        sharded, optimizer = self.setting.shard(scenario, model)
        assert any(len(unit.modules) > 1 for unit in engine_of(sharded).units)
        return sharded, optimizer


def freeze_and_thaw(run: Run) -> None:
    layer = run.module.get_submodule("layers.1")
    for is_trained in (True, False, True):
        layer.requires_grad_(is_trained)
        run.loss(0).backward()
        run.optimizer.step()
        run.note_parameters()
        run.optimizer.zero_grad()


FIVE = vector_case(partial(Ordered, (0, 1, 2, 3, 4), layers=5))
CASES: dict[str, tuple[Callable[[Run], None], ModelCase]] = {
    "in order": (three_steps, FIVE),
    "accumulated": (accumulate, FIVE),
    # layer 2 is never called, layer 0 twice
    "in another order": (three_steps, vector_case(partial(Ordered, (3, 0, 4, 1, 0), layers=5))),
    "frozen in between": (freeze_and_thaw, FIVE),
    "recomputed": (accumulate, vector_case(partial(Recomputed, "units", False))),
    "recomputed, reentrant": (three_steps, vector_case(partial(Recomputed, "pairs", True))),
    "with losses of their own": (three_steps, vector_case(Penalised)),
    "recomputed inside one another": (three_steps, vector_case(NeighbourCallers)),
}


@pytest.mark.full(short=["accumulated-1", "in another order-3", "recomputed-2", "recomputed inside one another-2"])
@pytest.mark.parametrize(("name", "num_ranks"), list(zip(CASES, cycle([2, 1, 3, 2]), strict=False)))
def test_merged_units_equal_one_process(run_ranks: RunRanks, name: str, num_ranks: int) -> None:
    scenario = Scenario(*CASES[name])
    settings = [Merged(2 + strategy % 2, Setting(strategy)) for strategy in (3, 0)]
    settings.append(Merged(9))
    tolerance = ONE_RANK if num_ranks == 1 else FP32
    check_jobs(run_ranks, num_ranks, [(scenario, setting) for setting in settings], tolerance)


# ---- what is sent, and who may differ ----------------------------------------------------------------------------


def _wrap(strategy: int, message: str | None, layers: int = 6) -> Sharded:
    os.environ.pop("MFSDP_MESSAGE_BYTES", None)
    if message is not None:
        os.environ["MFSDP_MESSAGE_BYTES"] = message
    case = vector_case(partial(Ordered, tuple(range(layers)), layers=layers))
    return shard(case, adamw_above_noise, zero_dp_strategy=strategy)


def _steps(model: MegatronFSDP, optimizer: torch.optim.Optimizer, count: int) -> None:
    for index in range(count):
        x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "message", "layers", "gathers", "reductions"),
    [
        (3, "0", 6, 11, 7),
        (3, str(2 * LAYER_BYTES), 6, 5, 4),
        (1, ALL, 6, 2, 2),
        (0, ALL, 6, 0, 2),
        # 40 small layers that a rank keeps whole are one unit. Of cut ones two and a half are an eighth of the half
        # that it keeps: 16 pairs, the last eight single, and the root.
        (0, None, 40, 0, 2),
        (1, None, 40, None, 25),
        (3, None, 40, None, 25),
    ],
)
@on_ranks(2)
def test_merged_units_take_one_message_each(
    strategy: int, message: str | None, layers: int, gathers: int | None, reductions: int
) -> None:
    model, optimizer = _wrap(strategy, message, layers)
    _steps(model, optimizer, 2)
    before = model.traffic()
    _steps(model, optimizer, 1)
    sent = model.traffic().since(before)
    assert sent.reductions == reductions
    assert sent.gathers == gathers or gathers is None


@on_ranks(2)
def test_faults_are_told_in_words() -> None:
    assert "message_bytes (of memory) is 0 on rank 0, 1 on rank 1" in refusal(_wrap, 3, str(dist.get_rank()))
    assert refusal(_wrap, 3, "4MB") == (
        "MFSDP_MESSAGE_BYTES=4MB is not a number of bytes; set it to 0 to merge no units, or leave it unset"
    )
    model, optimizer = _wrap(3, ALL)
    whole, layers = model.full_parameters(), model.module.layers
    with model.full_parameters_context(layers[2]):  # type: ignore[index]
        assert all(torch.equal(p, whole[f"layers.2.{n}"]) for n, p in layers[2].named_parameters())  # type: ignore[index]
        message = refusal(model.full_parameters_context(layers[3]).__enter__)  # type: ignore[index]
    assert message == "unit layers.0..5 shows its full parameters already; leave that full_parameters_context first"
    _steps(model, optimizer, 1)


def train_unmerged(run: Run) -> None:
    if run.sharded is not None:
        assert [unit.name for unit in engine_of(run.sharded).units[1:]] == [f"layers.{index}" for index in range(4)]
    run.train(0, 1)


def test_units_that_are_called_in_an_order_of_their_own_are_not_merged(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a merged unit would be called twice in a pass, around another one."""
    monkeypatch.setenv("MFSDP_MESSAGE_BYTES", str(2 * LAYER_BYTES))
    order = (0, 2, 1, 3)
    scenario = Scenario(train_unmerged, vector_case(partial(Ordered, order)))
    check_jobs(run_ranks, 2, [(scenario, Skips(order=order))])
