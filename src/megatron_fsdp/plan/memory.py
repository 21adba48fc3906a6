"""What one rank holds over a step, to the byte where the engine is concerned."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from heapq import nlargest

from megatron_fsdp.plan.planned_model import PlannedModel
from megatron_fsdp.plan.replay import Moment, ReplayedStep
from megatron_fsdp.sharding.accounting import persistent_bytes

_COUNTER_BYTES = 4


@dataclass(frozen=True)
class HeldBytes:
    """What is there when an optimizer steps; without the main gradients at all times.

    Attributes:
        compute_weights: Weights that forward and backward use.
        main_weights: Weights that the optimizer updates, where they are memory of their own.
        main_gradients: Accumulated gradients; only from a backward until they are cleared.
        optimizer: Optimizer state, counters of steps included.
        module_buffers: Buffers of modules, which every rank holds.
    """

    compute_weights: int
    main_weights: int
    main_gradients: int
    optimizer: int
    module_buffers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())

    @property
    def at_all_times(self) -> int:
        """What is there also when gradients are cleared."""
        return self.total - self.main_gradients


@dataclass(frozen=True)
class RankMemory:
    """One rank over a step.

    Attributes:
        held: At all times, main gradients excepted.
        input_bytes: Of a microbatch.
        peak: The moment at which most is there on top.
        saving_bytes: Host memory that a checkpoint in the background takes for its copy; saving at once takes none.
    """

    held: HeldBytes
    input_bytes: int
    peak: Moment
    saving_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that is there at a time."""
        return self.held.at_all_times + self.input_bytes + self.peak.total_bytes


def held_bytes(model: PlannedModel, module_buffer_bytes: int = 0, used: Collection[str] | None = None) -> HeldBytes:
    """Count what is there between steps.

    Args:
        model: Its layouts are those of the engine, so that the bytes are too.
        module_buffer_bytes: Of buffers.
        used: Names of the parameters that get gradients; None: all.
    """
    setup = model.setup
    found = persistent_bytes(model.footprints, setup.strategy, setup.optimizer.states_per_param)
    return HeldBytes(
        found.compute_weight,
        found.main_weight,
        found.main_grad,
        optimizer_bytes(model, used),
        module_buffer_bytes,
    )


def optimizer_bytes(model: PlannedModel, used: Collection[str] | None = None) -> int:
    """State of the optimizer on this rank; `used` as for `held_bytes`."""
    kind = model.setup.optimizer
    total = 0
    for group in model.optimizer_elements(used):
        total += kind.states_per_param * group.elements * group.itemsize
        total += _COUNTER_BYTES * group.parameters if kind.counts_steps else 0
    return total


def step_bytes(model: PlannedModel, used: Collection[str] | None = None) -> int:
    """What the optimizer's step borrows; `used` as for `held_bytes`."""
    kind = model.setup.optimizer
    groups = model.optimizer_elements(used)
    if kind.one_by_one:  # a run of parameters at a time, and the last value of the run before is still there
        first, second = nlargest(2, [*(group.elements * group.itemsize for group in groups), 0, 0])
        return kind.temporaries * first + second
    return kind.temporaries * sum(group.elements * group.itemsize for group in groups)


def memory_of(
    model: PlannedModel,
    step: ReplayedStep,
    input_bytes: int,
    module_buffer_bytes: int = 0,
    saved_buffer_bytes: int = 0,
    used: Collection[str] | None = None,
) -> RankMemory:
    """Put a rank's memory together.

    Args:
        model: The planned model.
        step: Its replayed step.
        input_bytes: Of a microbatch.
        module_buffer_bytes: Of buffers.
        saved_buffer_bytes: Of those that a checkpoint holds.
        used: Names of the parameters that get gradients; None: all.
    """
    return RankMemory(
        held_bytes(model, module_buffer_bytes, used),
        input_bytes,
        step.peak,
        saving_bytes=saving_bytes(model, used) + saved_buffer_bytes,
    )


def saving_bytes(model: PlannedModel, used: Collection[str] | None = None) -> int:
    """What a checkpoint of this rank holds of parameters and optimizer: main weights without padding, and state."""
    weights = 0
    for group in model.groups:
        ranges = (group.layout.range_in(index, group.main_region) for index in range(len(group.layout.shapes)))
        weights += sum(stop - start for start, stop in ranges) * group.precision.main_params.itemsize
    return weights + optimizer_bytes(model, used)
