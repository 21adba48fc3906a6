"""What one run saw, as plain data that can be sent and compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Values = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; tensors are whole, on the CPU, by the names of the user's model.

    Attributes:
        loss: Mean over ranks and microbatches.
        losses_of_ranks: The loss of every rank, mean over its microbatches; empty in one process.
        gradients: Before clipping; None where there is none.
        norm: Total 2-norm before clipping; None where nothing is clipped.
        counters: The optimizer's `step` of each parameter, after the update.
        parameters: After the update.
        state: The optimizer's other tensors after the update, as `<parameter>: <slot>`.
    """

    loss: float
    losses_of_ranks: tuple[float, ...]
    gradients: Values
    norm: float | None
    counters: Mapping[str, float]
    parameters: Values
    state: Values


@dataclass(frozen=True)
class Disagreement:
    """Something that ranks hold different values of, though all of them should hold the same.

    Attributes:
        place: Which stage and step.
        name: Which tensor.
        by_rank: Value of each rank.
    """

    place: tuple[str, int]
    name: str
    by_rank: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class RoundTrip:
    """A checkpoint saved after the last step, loaded into a fresh model, and one more step of both.

    Attributes:
        saved: Weights and optimizer state that were saved.
        loaded: The same of the fresh model after loading.
        went_on: Weights of the run that saved, one step later.
        resumed: Weights of the run that loaded, one step later.
    """

    saved: Values
    loaded: Values
    went_on: Values
    resumed: Values


@dataclass(frozen=True)
class Observation:
    """A whole run.

    Attributes:
        initial: Weights before the first step.
        steps: One record per optimizer step.
        buffers: Buffers after the last step; in one process that does what ranks do, those of rank 0.
        round_trip: None where it was not asked for, and in one process.
        disagreements: Where ranks hold different values, in the order of causes.
        owners: Which rank holds each element of the parameters that are sharded; flat, int16.
    """

    initial: Values
    steps: tuple[StepRecord, ...]
    buffers: Values
    round_trip: RoundTrip | None = None
    disagreements: tuple[Disagreement, ...] = ()
    owners: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StaleStep:
    """What a step would have been with the weights before the last update."""

    loss: float
    gradients: Values


@dataclass(frozen=True)
class Probes:
    """What one process tried out, so that faults can be told by name.

    Attributes:
        num_ranks: Data-parallel ranks.
        microbatches: Per step.
        frozen: Parameters that are not trained.
        backward_order: Parameters in the order in which their gradients came.
        losses_of_ranks: Loss of each rank's samples in step 1.
        of_ranks: Gradients of each rank's samples alone, in step 1.
        of_microbatches: Gradients of each microbatch alone, in step 1, divided as in the whole.
        stale: For each step after the first: with the weights before the last update.
        spread: For each step: how far a weight, or optimizer state, moves when gradients change by what rounding may
            change them.
        betas: Adam's, where the optimizer has any.
        decay: What part of each weight its decay takes off in one update: learning rate times weight decay.
        excused: Buffers that differ between ranks in right runs: statistics of batch normalisation.
    """

    num_ranks: int
    microbatches: int
    frozen: frozenset[str]
    backward_order: tuple[str, ...]
    losses_of_ranks: tuple[float, ...] = ()
    of_ranks: tuple[Values, ...] = ()
    of_microbatches: tuple[Values, ...] = ()
    stale: tuple[StaleStep, ...] = ()
    spread: tuple[Values, ...] = ()
    betas: tuple[float, float] | None = None
    excused: frozenset[str] = frozenset()
    decay: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """One process on the whole batch, and what it tried out."""

    observation: Observation
    probes: Probes
    notes: tuple[str, ...] = field(default=())
