"""Each switch for communication changes something that can be seen: order, number of collectives, memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.engine.schedule import Action, Operation
from tests.support.api_net import Layer, backward, batches, build, largest_difference, mesh, train, weights, wrap
from tests.support.formulas import exchange_scratch_bytes, footprints_of, step_traffic, transient_bytes
from tests.support.on_ranks import engine_of, on_ranks
from tests.support.zoo import FLOOR_NUMEL, TOWER_FEATURES, Floor, Tower, tower_step

pytestmark = pytest.mark.unmerged

FLOORS = 5


@dataclass
class Trace:
    """What happened in one steady step on one rank."""

    events: list[str] = field(default_factory=list)
    in_reduction: list[int] = field(default_factory=list)
    transient_bytes: int = 0

    def of(self, *kinds: str) -> list[str]:
        """The events of some kinds."""
        return [event for event in self.events if event.rstrip("0123456789") in kinds]

    @property
    def ahead(self) -> int:
        """The most units that were on their way, beside the one waited for, at any wait."""
        under_way: set[str] = set()
        most = 0
        for event in self.of("unshard", "wait"):
            unit = event.rpartition("unshard")[2].removeprefix("wait")
            if event.startswith("wait"):
                under_way.discard(unit)
                most = max(most, len(under_way))
            else:
                under_way.add(unit)
        return most


def observe(model: MegatronFSDP, trace: Trace) -> None:
    """Note what the engine does from now on, each gradient too."""
    engine = engine_of(model)
    engine.observers.active = True
    run, take = engine.executor.run, engine.take_gradient

    def note_operations(operations: tuple[Operation, ...], defer: bool = False) -> None:
        for operation in operations:
            run((operation,), defer)
            if operation.action is not Action.FINALISE:
                trace.events.append(str(operation).split("@")[0])
            trace.in_reduction.append(len(engine.executor.in_flight))

    def note_gradient(unit_index: int, group_index: int, index: int, param: nn.Parameter) -> None:
        trace.events.append(f"grad{unit_index}")
        take(unit_index, group_index, index, param)

    engine.executor.run = note_operations  # type: ignore[method-assign, assignment]
    engine.take_gradient = note_gradient  # type: ignore[method-assign]


def trace_of(options: dict[str, Any], sizes: dict[str, int] | None = None) -> Trace:
    """The third step of a tower of five floors; `sizes` are properties set after wrapping."""
    model = fully_shard_model(Tower((32,) * FLOORS), fsdp_unit_modules=[Floor], **options)
    for name, value in (sizes or {}).items():
        setattr(model, name, value)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, TOWER_FEATURES)
    trace = Trace()
    for step in range(3):
        if step == 2:
            observe(model, trace)
        tower_step(model, optimizer, x)
    trace.transient_bytes = model.memory().transient_peak_bytes
    return trace


@pytest.mark.parametrize(("strategy", "overlap"), [(0, True), (0, False), (2, True), (2, False)])
@on_ranks(2)
def test_gradients_are_reduced_during_backward_or_after_it(strategy: int, overlap: bool) -> None:
    trace = trace_of({"zero_dp_strategy": strategy, "overlap_grad_reduce": overlap})
    events = trace.of("grad", "reduce")
    reductions = [f"reduce{unit}" for unit in range(FLOORS, -1, -1)]
    assert [event for event in events if event.startswith("reduce")] == reductions
    early = overlap or strategy >= 2
    # With overlap a unit is reduced as soon as its two gradients are there, else after the last gradient.
    assert events.index("reduce5") == (events.index("grad4") - 1 if early else len(events) - len(reductions))
    # Gradients that are reduced in place wait for no bucket; an exchange (strategies 1 to 3 on gloo) waits for the
    # block that the one before received into.
    assert max(trace.in_reduction) == (FLOORS + 1 if strategy == 0 else 1)


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_weights_are_gathered_ahead_or_on_demand(overlap: bool) -> None:
    found = [trace_of({"zero_dp_strategy": each, "overlap_param_gather": overlap}) for each in (0, 1, 3)]
    assert found[0].of("unshard", "wait") == []
    assert [trace.ahead for trace in found[1:]] == [int(overlap), 1]


# ---- how far ahead, how many at a time -----------------------------------------------------------------------------

AHEAD: list[tuple[dict[str, Any], dict[str, int], int]] = [
    ({}, {}, 1),
    ({"max_gathered_units": 1}, {}, 0),
    ({"forward_prefetch_units": 0, "backward_prefetch_units": 0}, {}, 0),
    ({"forward_prefetch_units": 3}, {}, 3),
    ({}, {"suggested_AG_prefetch_size": 2 * FLOOR_NUMEL}, 2),
    ({"max_gathered_units": 2}, {"suggested_AG_prefetch_size": 9 * FLOOR_NUMEL}, 1),
    ({"weight_allocator": "resize"}, {"suggested_AG_prefetch_size": 3 * FLOOR_NUMEL}, 3),
    ({"zero_dp_strategy": 1, "forward_prefetch_units": 4}, {}, 4),
]


@on_ranks(2)
def test_so_many_units_are_gathered_ahead_as_asked_for() -> None:
    assert [trace_of(options, sizes).ahead for options, sizes, _ in AHEAD] == [ahead for _, _, ahead in AHEAD]


@pytest.mark.parametrize(
    ("ahead", "backward"),
    [
        (0, "reduce5 reduce4 reduce3 unshard2 wait2 reduce2 unshard1 wait1 reduce1 reduce0"),
        # Unit 2 is gathered as soon as the backward of unit 4 begins, and unit 1 with that of unit 3.
        (2, "reduce5 unshard2 reduce4 unshard1 reduce3 wait2 reduce2 wait1 reduce1 reduce0"),
    ],
)
@on_ranks(2)
def test_backward_looks_ahead_by_itself(ahead: int, backward: str) -> None:
    options = {"max_gathered_units": 3, "forward_prefetch_units": 0, "backward_prefetch_units": ahead}
    forward = " ".join(f"unshard{unit} wait{unit}" for unit in range(FLOORS + 1))
    assert " ".join(trace_of(options).of("unshard", "wait", "reduce")) == f"{forward} {backward}"


@pytest.mark.parametrize(
    ("unit_size", "capacity", "ahead", "buckets", "units"),
    [
        (3 * FLOOR_NUMEL, None, 3, 3, 4),
        (FLOOR_NUMEL // 2, None, 1, 1, 2),
        (99 * FLOOR_NUMEL, None, 5, 5, 6),
        (None, 4 * FLOOR_NUMEL + 1, 1, 4, 2),
        (2 * FLOOR_NUMEL, 0, 2, 1, 3),
    ],
)
@on_ranks(2)
def test_sizes_in_elements_become_units_and_buckets(
    unit_size: int | None, capacity: int | None, ahead: int, buckets: int, units: int
) -> None:
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", suggested_communication_unit_size=unit_size
    )
    index = FSDPDistributedIndex(mesh(), "dp")
    model = MegatronFSDP(
        Tower((32,) * FLOORS), index, config, fsdp_unit_modules=[Floor], sync_model_each_microbatch=True
    )
    if capacity is not None:
        model.suggested_RS_queue_capacity = capacity
    assert model.suggested_AG_prefetch_size == ahead * FLOOR_NUMEL
    assert model.suggested_RS_queue_capacity == buckets * FLOOR_NUMEL
    assert model.max_gathered_units == units
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    trace = Trace()
    observe(model, trace)
    for _ in range(2):
        before = model.traffic()
        tower_step(model, optimizer, torch.ones(2, TOWER_FEATURES))
    groups, strategy = footprints_of(model), ShardingStrategy.optim_grads_params
    scratch = exchange_scratch_bytes(groups, strategy, buckets)
    assert model.memory().transient_peak_bytes == transient_bytes(groups, strategy, units, buckets, scratch).total
    assert model.traffic().since(before).gathers == step_traffic(groups, strategy, 1, units).gathers
    assert max(trace.in_reduction) == max(1, buckets - 1)


# ---- loops that drive gathers and reductions by hand -----------------------------------------------------------------


def sgd(model: MegatronFSDP) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks(2)
def test_released_units_are_gathered_again_and_others_are_not() -> None:
    model = wrap()
    first, head = model.module.layers[0], model.module.head

    def gathers(call: Callable[..., object], *args: object) -> int:
        before = model.traffic()
        call(*args)
        return model.traffic().since(before).gathers

    assert gathers(model.pre_backward, first) == 1
    assert gathers(model.pre_backward, first) == 0
    model.post_forward_release_module(first)
    assert gathers(model.pre_backward, first) == 1
    model.post_backward_release_module(first)
    assert gathers(model.pre_backward, first) == 1
    model.post_forward_release_module(model.module)  # every unit but the root
    assert gathers(model.pre_backward, head) == 1
    model.post_forward_release_module(head)
    assert gathers(model.pre_backward, head) == 0


@on_ranks(2)
def test_driving_by_hand_changes_traffic_and_not_results() -> None:
    """Every unit is resharded after each forward and the last is reduced on demand."""
    plain, driven = wrap(), wrap()
    train(plain, sgd(plain), 3)
    layers, optimizer = driven.module.layers, sgd(driven)
    for module in layers:
        module.register_forward_hook(lambda layer, _args, _out: driven.post_forward_release_module(layer))
    layers[1].register_full_backward_hook(lambda layer, _in, _out: driven.post_backward(layer))
    for batch in batches(3):
        optimizer.zero_grad()
        backward(driven, batch)
        optimizer.step()
    assert largest_difference(weights(driven), weights(plain)) < 1e-6
    assert driven.traffic().gathers > plain.traffic().gathers


@pytest.mark.parametrize("starts_only", [True, False])
@pytest.mark.parametrize("force_sync", [True, False])
@on_ranks(2)
def test_start_param_sync_starts_gathers_or_finishes_them_as_the_config_says(
    starts_only: bool, force_sync: bool
) -> None:
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        fsdp_all_gather_in_start_param_sync=starts_only,
    )
    model = MegatronFSDP(build(), FSDPDistributedIndex(mesh(), "dp"), config, fsdp_unit_modules=[Layer])
    optimizer = sgd(model)
    train(model, optimizer, 1)
    before = model.traffic()
    model.start_param_sync(force_sync=force_sync)
    assert [bool(unit.works) for unit in engine_of(model).units] == [starts_only and not force_sync] * 3
    assert model.traffic().since(before).gathers == 3
    train(model, optimizer, 2, first=1)
    # Those of the first step and of the second; backward finds all in their slots.
    assert model.traffic().since(before).gathers == 3 + 3
    reference = build()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), 3)
    assert largest_difference(weights(model), weights(reference)) < 1e-6
