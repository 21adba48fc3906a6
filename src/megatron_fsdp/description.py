"""What a wrapped model is, as it was applied: plain data, for people (`str`) and for programs (`to_dict`). Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_fsdp.description_text import lines_of


@dataclass(frozen=True)
class AxisDescription:
    """One mesh axis as seen from this rank.

    Attributes:
        name: Of its mesh dimension.
        role: "shard", "outer", "tensor parallel", "expert shard" or "expert outer".
        size: Ranks on it.
        position: This rank's, from 0.
        ranks: Global ranks of its group, in order; just this one where it never communicates.
        backend: Of its group; None for a single rank.
        has_gather_group: Whether gathers run over a second group of the same ranks.
        shares_memory: Whether they run through memory that the ranks share, and not over the group.
    """

    name: str
    role: str
    size: int
    position: int
    ranks: tuple[int, ...]
    backend: str | None
    has_gather_group: bool = False
    shares_memory: bool = False


@dataclass(frozen=True)
class GroupDescription:
    """Parameters of one unit that share their buffers.

    Attributes:
        parameters: How many.
        numel: Elements of them, on this tensor-parallel rank.
        padding_numel: Further elements of the buffer.
        shard_numel: Elements of main weights, and of optimizer state, on this rank, padding included.
        granularity: What shard edges may not cut, the finest wish first.
        is_trainable: Whether they take gradients.
        is_expert: Whether they belong to experts.
        tensor_parallel: How many of them tensor parallelism has cut before.
        storage: Dtype of compute weights at rest.
        compute: In forward and backward.
        gather: In which weights travel; None where they do not.
        reduce: In which gradients travel; None where they do not.
        accumulate: Of main gradients; None where frozen.
        main: Of main weights.
        optimizer_state: Of the optimizer's state, as far as there is any.
        compute_weight: Placements of compute weights, outermost axis first.
        main_gradient: Of main gradients after a sync; empty where frozen.
        main_weight: Of main weights.
        compute_bytes: Held for compute weights at rest.
        main_bytes: Held for main weights that are memory of their own.
        gradient_bytes: Held for main gradients.
    """

    parameters: int
    numel: int
    padding_numel: int
    shard_numel: int
    granularity: tuple[str, ...]
    is_trainable: bool
    is_expert: bool
    tensor_parallel: int
    storage: str
    compute: str
    gather: str | None
    reduce: str | None
    accumulate: str | None
    main: str
    optimizer_state: tuple[str, ...]
    compute_weight: tuple[str, ...]
    main_gradient: tuple[str, ...]
    main_weight: tuple[str, ...]
    compute_bytes: int
    main_bytes: int
    gradient_bytes: int

    @property
    def padding_fraction(self) -> float:
        """Padding in relation to the parameters."""
        return self.padding_numel / max(1, self.numel)


@dataclass(frozen=True)
class UnitDescription:
    """What is gathered and reduced together.

    Attributes:
        index: 0 is the root.
        label: Its name, "(root)" for the root.
        class_name: Of its module, or what else it is.
        numel: Elements of its parameters.
        groups: Its parameter groups.
    """

    index: int
    label: str
    class_name: str
    numel: int
    groups: tuple[GroupDescription, ...]


@dataclass(frozen=True)
class MemoryDescription:
    """Memory of this rank, in bytes, and how it is borrowed.

    Attributes:
        allocator: Of gathered weights.
        slots: How many units besides the root are gathered at a time, where weights are sharded at rest; else 0.
        slot_bytes: Of each slot.
        buckets: How many units besides the root fill a bucket or have one in reduction at a time.
        bucket_bytes: Of each bucket.
        forward_prefetch: Units gathered ahead in forward.
        backward_prefetch: The same in backward.
        persistent_bytes: Weights and gradients between steps.
        optimizer_bytes: State of connected optimizers.
        gathered_bytes: What gathered weights take now.
        transient_peak_bytes: The most that gathered weights, buckets and scratch have taken so far.
        shared_bytes: What this rank takes of memory that ranks share.
    """

    allocator: str
    slots: int
    slot_bytes: int
    buckets: int
    bucket_bytes: int
    forward_prefetch: int
    backward_prefetch: int
    persistent_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    transient_peak_bytes: int
    shared_bytes: int = 0


@dataclass(frozen=True)
class OptimizerDescription:
    """A connected optimizer.

    Attributes:
        class_name: Of it.
        param_groups: How many.
        parameters: How many of the model's.
        steps_locally: Whether it takes the fast step on plain local tensors.
    """

    class_name: str
    param_groups: int
    parameters: int
    steps_locally: bool


@dataclass(frozen=True)
class OptionDescription:
    """One option.

    Attributes:
        name: As the caller writes it.
        value: As it was applied.
        is_default: Whether that is what leaving it out gives.
        has_effect: Whether anything would be otherwise with another value, here and now.
        effect: Which, or why none.
    """

    name: str
    value: str
    is_default: bool
    has_effect: bool
    effect: str


@dataclass(frozen=True)
class Description:
    """A wrapped model as this rank holds it.

    Attributes:
        wrapper: Class of the wrapper.
        model: Class of the model.
        rank: Global rank.
        world_size: All ranks of the job.
        device: Where the buffers live.
        strategy: On the sharding axis.
        outer_strategy: On the outer axis; None where there is none.
        axes: Data-parallel axes of dense parameters, outermost first, then of experts, then tensor parallel.
        own_groups: Whether the engine communicates over process groups of its own.
        unit_source: How the units were found.
        units: The root first.
        tied: (further name, first name) of tied parameters.
        frozen_numel: Elements of parameters that are not trained.
        unused: Trainable parameters that no rank had a gradient for; None: not known before a backward.
        memory: Bytes, slots and buckets.
        optimizers: Those that are connected.
        options: Every option that this wrapper takes.
        notices: What was adjusted or derived, in words.
    """

    wrapper: str
    model: str
    rank: int
    world_size: int
    device: str
    strategy: str
    outer_strategy: str | None
    axes: tuple[AxisDescription, ...]
    own_groups: bool
    unit_source: str
    units: tuple[UnitDescription, ...]
    tied: tuple[tuple[str, str], ...]
    frozen_numel: int
    unused: tuple[str, ...] | None
    memory: MemoryDescription
    optimizers: tuple[OptimizerDescription, ...]
    options: tuple[OptionDescription, ...]
    notices: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters, on this tensor-parallel rank."""
        return sum(unit.numel for unit in self.units)

    def option(self, name: str) -> OptionDescription:
        """One option by name.

        Raises:
            KeyError: There is none of that name.
        """
        found = next((option for option in self.options if option.name == name), None)
        if found is None:
            raise KeyError(name)
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain values that JSON can hold."""
        plain = _plain(dataclasses.asdict(self))
        assert isinstance(plain, dict)
        return plain

    def __str__(self) -> str:
        """For people."""
        return "\n".join(lines_of(self))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
