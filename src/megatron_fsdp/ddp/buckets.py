"""Buckets of parameters: their plan, and the schedule of their all-gathers and reductions. Pure.

Backward computes gradients roughly in reverse order of registration, so buckets are filled from the last parameter to
the first, each kind of parameter by itself, and closed as soon as they reach their size. A bucket is complete when the
gradient of its first parameter comes, so buckets are sorted by that: bucket 1 holds the first parameters of the model
and is reduced last. To the scheduler unit 0 is the root, unit k is bucket k.

A bucket is reduced when all its gradients have come, and never before the buckets behind it: so all ranks reduce in
the same order, whatever gradients their data gives. The number of gradients of a parameter in one backward is recorded
(a parameter in a reentrantly recomputed part gets several): the first backward reduces everything at its end.

Weights are gathered in forward order, whichever of them a rank reads first: one bucket ahead of its use, or all
together. Buckets that a forward does not read are gathered when it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from megatron_fsdp.engine.schedule import Operation, ScheduleConfig, Scheduler
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.sharding.units import ROOT_UNIT, GroupKey, ParameterInfo, UnitPlan, UnitSpec

BUCKET_NAME = "bucket {}"


def cut_buckets(
    parameters: Sequence[ParameterInfo], bucket_numel: int | None, alone: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Divide the trainable parameters of a model into buckets of names, sorted by first parameter.

    Parameters of a bucket agree in their `GroupKey`, and lie in it in model order; none is cut. The one with which a
    bucket reaches `bucket_numel` elements is its last; None: no limit. Names in `alone` get a bucket of their own.
    """
    order = {info.name: number for number, info in enumerate(parameters)}
    open_buckets: dict[GroupKey, list[ParameterInfo]] = {}
    filled = Counter[GroupKey]()  # elements of each open bucket
    closed: list[list[ParameterInfo]] = []
    for info in reversed(parameters):
        if not info.key.requires_grad:
            continue
        if info.name in alone:
            closed.append([info])
            continue
        bucket = open_buckets.setdefault(info.key, [])
        bucket.append(info)
        filled[info.key] += info.numel
        if bucket_numel is not None and filled[info.key] >= bucket_numel:
            closed.append(open_buckets.pop(info.key))
            del filled[info.key]
    closed += open_buckets.values()
    in_order = sorted(closed, key=lambda bucket: order[bucket[-1].name])
    return tuple(tuple(info.name for info in reversed(bucket)) for bucket in in_order)


def plan_buckets(
    parameters: Sequence[ParameterInfo],
    root_class: str,
    aliases: Sequence[tuple[str, str]],
    bucket_numel: int | None,
    alone: Collection[str] = (),
) -> UnitPlan:
    """Plan the units of the engine: the root with the frozen parameters, then one unit per bucket."""
    frozen = tuple(info.name for info in parameters if not info.key.requires_grad)
    buckets = cut_buckets(parameters, bucket_numel, alone)
    size = "one bucket per kind" if bucket_numel is None else f"closed at {bucket_numel:,} parameters"
    units = [UnitSpec.of_module("", frozen, root_class)]
    units += [
        UnitSpec(BUCKET_NAME.format(number), names, "parameters", modules=())
        for number, names in enumerate(buckets, start=1)
    ]
    return UnitPlan(tuple(units), f"buckets in backward order, {size}", tuple(aliases))


def plan_readers(
    owned: Sequence[tuple[str, frozenset[int]]], called: Callable[[str], bool]
) -> dict[str, frozenset[int]]:
    """Return the buckets read by each called module.

    A module reads the parameters it owns, and those of the modules below it that are never called themselves: their
    weights are used by a module above them (as `nn.MultiheadAttention` uses those of its output projection). A module
    that was not called reads everything below it, should it be called one day.
    """
    found: dict[str, set[int]] = {}
    for name, buckets in owned:
        reader = name
        found.setdefault(reader, set()).update(buckets)
        while reader and not called(reader):
            reader = reader.rpartition(".")[0]
            found.setdefault(reader, set()).update(buckets)
    return {name: frozenset(buckets) for name, buckets in found.items() if buckets}


class GatherMode(Enum):
    """The time at which changed weights are all-gathered."""

    AT_ONCE = "at once"  # all before the forward, which waits for them
    TOGETHER = "together"  # all are started before the forward; each is waited for where it is used
    IN_TURN = "in turn"  # each is started when the one before it is used


class _Arrivals:
    """Counts of the gradients of each parameter of one bucket in a backward."""

    def __init__(self, count: int, trained: int) -> None:
        self.expected = [0] * count  # the most in any backward; 0: not known
        self.now = [0] * count
        self.missing = trained  # parameters whose last gradient has not come yet
        self.trained = trained  # parameters that get any

    def forget(self) -> None:
        """Reset the counts for the next backward."""
        self.now = [0] * len(self.now)
        self.missing = self.trained


class BucketScheduler(Scheduler):
    """The scheduler of buckets."""

    def __init__(self, config: ScheduleConfig, counts: Sequence[int], gather_mode: GatherMode) -> None:
        super().__init__(config)
        self.gather_mode = gather_mode
        self._arrivals = [_Arrivals(count, count) for count in counts]
        self.learns = True  # the counts of the backward, which reduces all at its end; none has ended yet
        self._next = len(counts) - 1  # the bucket to be reduced next

    # ---- weights ------------------------------------------------------------------------------------------------

    def forward_opens(self) -> tuple[Operation, ...]:
        """Start the all-gathers of the model's forward, at its beginning or ahead of it."""
        if self.gather_mode is GatherMode.AT_ONCE:
            return self.everything()
        count = len(self._units) if self.gather_mode is GatherMode.TOGETHER else ROOT_UNIT + 2
        return tuple(op for unit in range(min(count, len(self._units))) for op in self.prefetch_requested(unit))

    def everything(self) -> tuple[Operation, ...]:
        """All-gather all weights, then wait for all."""
        units = range(len(self._units))
        started = [op for unit in units for op in self.prefetch_requested(unit)]
        return (*started, *(op for unit in units for op in self.weights_requested(unit)))

    def weights_read(self, units: Collection[int]) -> tuple[Operation, ...]:
        """Wait for the buckets that a module is about to read; prefetch all up to the next one."""
        last = min(max(units, default=ROOT_UNIT) + 1, len(self._units) - 1)
        started = [op for unit in range(last + 1) for op in self.prefetch_requested(unit)]
        return (*started, *(op for unit in sorted(units) for op in self.weights_requested(unit)))

    # ---- gradients ----------------------------------------------------------------------------------------------

    def backward_begins(self, unit: int, weights_version: int, reads_weights: bool = True) -> tuple[Operation, ...]:
        """Begin a backward, which reduces every bucket, even without a gradient on this rank."""
        operations = super().backward_begins(unit, weights_version, reads_weights)
        self._open_all()
        return operations

    def gradient_arrives(self, unit: int) -> None:
        """Begin a bucket with its first gradient."""
        if self._in_backward and self._units[unit].in_backward and self._units[unit].reduced:
            raise ScheduleError(
                "a gradient arrived after its bucket was reduced: earlier backwards had fewer gradients for the same "
                "parameters (reentrant activation checkpoints give several); use use_reentrant=False, or "
                "overlap_grad_reduce=False, which reduces after the backward"
            )
        super().gradient_arrives(unit)
        self._open_all()

    def gradient_counted(self, unit: int, parameter: int) -> tuple[Operation, ...]:
        """Count a gradient of a bucket's parameter; return the reductions that can start, in order."""
        arrivals = self._arrivals[unit]  # here, and not by a method: this runs for every gradient
        count = arrivals.now[parameter] = arrivals.now[parameter] + 1
        if count == (arrivals.expected[parameter] or 1):
            arrivals.missing -= 1
        if arrivals.missing or self.learns or not self.config.reduces_early:
            return ()
        operations: list[Operation] = []
        while self._next > ROOT_UNIT and not self._arrivals[self._next].missing:
            if self.config.trainable[self._next]:
                operations += self.gradients_ready(self._next)
            self._next -= 1
        return tuple(operations)

    def backward_ends(self) -> tuple[Operation, ...]:
        """End a backward; the next one expects as many gradients."""
        for arrivals in self._arrivals:
            arrivals.expected = list(map(max, arrivals.expected, arrivals.now))
        self.learns = False
        self._forget_arrivals()
        return super().backward_ends()

    def set_trainable(self, units: Sequence[Sequence[bool]]) -> None:
        """Set the trainable parameters; the gradients per backward are counted anew."""
        super().set_trainable(units)
        self._arrivals = [_Arrivals(len(flags), sum(flags)) for flags in units]
        self.learns = True

    def reset(self) -> tuple[Operation, ...]:
        """Drop interrupted passes."""
        self.learns = True
        self._forget_arrivals()
        return super().reset()

    def _forget_arrivals(self) -> None:
        self._next = len(self._units) - 1
        for arrivals in self._arrivals:
            arrivals.forget()

    def _open_all(self) -> None:
        for unit in range(ROOT_UNIT + 1, len(self._units)):
            state = self._units[unit]
            if self.config.trainable[unit] and not state.in_backward:
                state.in_backward, state.reduced = True, False
