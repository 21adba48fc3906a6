"""The options of a pipeline, the supported schedules of torch, and the layers of each stage."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, ParallelSizeError

_FIRST_FIXED = 8
"""Index of the first field of `PipelineConfig` that has to keep its default."""


@dataclass
class PipelineConfig:
    """Options of pipeline parallelism; the number of ranks of a pipeline is `pp_size`, given elsewhere.

    Attributes:
        pp_schedule: "1f1b" or "gpipe" (one stage per rank), "interleaved1f1b" or "loopedbfs" (several); in upper or
            lower case.
        pp_microbatch_size: Rows that pass through the stages at a time.
        pp_batch_size: Rows that a training step of one data-parallel rank takes. 1 (the default; no pipeline can be
            filled by one row): any number, checked at each step; more: just this number, checked already when the
            pipeline is built.
        layers_per_stage: Decoder layers of a stage at most; None: as many as one stage per rank, or two stages per rank
            under schedules with several, give.
        scale_grads_in_schedule: `loss_fn` gives the mean over a microbatch, and gradients and loss are divided by the
            number of microbatches. Needs `loss_fn`.
        loss_fn: (logits (microbatch, sequence, vocabulary), labels (microbatch, sequence)) -> scalar; labels are
            those of the same position, with -100 where nothing counts. It gives the sum over the counted labels,
            unless `scale_grads_in_schedule`. None: the sum of cross entropies in float32.
        dtype: Of the hidden states that stages send; None: what `mp_policy` of the strategy says. Another one is
            refused when the pipeline is built.
        pp_seq_len: Length of the sequences; checked at each step. None: any.
        pp_schedule_csv: Not supported yet; so are the next two.
        round_virtual_stages_to_pp_multiple: None.
        module_fqns_per_model_part: None.
        patch_inner_model: True: stages run transformers' layers by forwards of their own.
        patch_causal_lm_model: True.
        patch_stage_backward_maybe_with_nosync: False: gradients are reduced once for each step in any case.

    Raises:
        ConfigurationError: A value is not one of these.
        NotSupportedYetError: A field that is not supported is not at its default.
    """

    pp_schedule: str = "1f1b"
    pp_microbatch_size: int = 1
    pp_batch_size: int = 1
    layers_per_stage: int | None = None
    scale_grads_in_schedule: bool = False
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None
    pp_seq_len: int | None = None
    pp_schedule_csv: str | None = None
    round_virtual_stages_to_pp_multiple: str | None = None
    module_fqns_per_model_part: list[list[str]] | None = None
    patch_inner_model: bool = True
    patch_causal_lm_model: bool = True
    patch_stage_backward_maybe_with_nosync: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[_FIRST_FIXED:]:
            if getattr(self, field.name) != field.default:
                raise NotSupportedYetError(
                    f"PipelineConfig.{field.name}={getattr(self, field.name)!r} is not supported yet; leave it at "
                    f"{field.default!r} (pp_schedule and layers_per_stage say how layers are divided)"
                )
        schedule_named(self.pp_schedule)
        for name in ("pp_microbatch_size", "pp_batch_size", "layers_per_stage", "pp_seq_len"):
            value = getattr(self, name)
            if value is None and name in ("layers_per_stage", "pp_seq_len"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name} is {value!r} but has to be an integer of at least 1")
        if self.pp_batch_size > 1 and self.pp_batch_size % self.pp_microbatch_size:
            raise ConfigurationError(
                f"pp_batch_size={self.pp_batch_size} is no multiple of pp_microbatch_size={self.pp_microbatch_size}; "
                "change one of them, since all microbatches have the same number of rows"
            )
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ConfigurationError(
                f"loss_fn is {self.loss_fn!r} but has to be a function of logits and labels, or None for cross entropy"
            )
        if self.scale_grads_in_schedule and self.loss_fn is None:
            raise ConfigurationError(
                "scale_grads_in_schedule=True needs a loss_fn that gives the mean over a microbatch; the loss without "
                "loss_fn is already divided by the number of labels of the whole batch, so leave it False"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return field name -> value, in order; `loss_fn` is the function itself."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule of torch."""

    name: str  # as torch spells it
    several_stages: bool = False  # a rank may have more than one stage
    fills_pipeline: bool = False  # it needs at least as many microbatches as stages
    rounds: bool = False  # it runs microbatches in equal rounds of at least as many as there are ranks


_KINDS = (
    ScheduleKind("1F1B", fills_pipeline=True),
    ScheduleKind("GPipe"),
    ScheduleKind("Interleaved1F1B", several_stages=True, rounds=True),
    ScheduleKind("LoopedBFS", several_stages=True),
)


def schedule_named(name: str) -> ScheduleKind:
    """Find a schedule by its name in any case.

    Torch has more, which are not supported: the V-shaped ones cannot evaluate, and those that split backward (zero
    bubble) silently leave parameters without gradients if FSDP2 has released weights after forward.
    """
    for kind in _KINDS:
        if str(name).lower() == kind.name.lower():
            return kind
    allowed = ", ".join(kind.name.lower() for kind in _KINDS)
    raise ConfigurationError(f"pp_schedule is {name!r} but has to be one of {allowed}")


def count_microbatches(kind: ScheduleKind, rows: int, microbatch_size: int, num_ranks: int, num_stages: int) -> int:
    """Count the microbatches of a batch's rows, and raise for numbers that the schedule cannot run."""
    count, rest = divmod(rows, microbatch_size)
    if rest or not count:
        raise ConfigurationError(
            f"a batch of {rows} rows does not divide into microbatches of pp_microbatch_size={microbatch_size}; "
            "give a multiple of it, or change pp_microbatch_size"
        )
    made = f"{rows} rows in microbatches of {microbatch_size} make {count} microbatches"
    if kind.fills_pipeline and count < num_stages:
        raise ConfigurationError(
            f"{made}, but {kind.name} needs at least one for each of the {num_stages} stages; give more rows, lower "
            "pp_microbatch_size, or use gpipe"
        )
    num_rounds = max(1, count // num_ranks)
    if kind.rounds and count % num_rounds:
        raise ConfigurationError(
            f"{made}, but {kind.name} on {num_ranks} ranks runs them in {num_rounds} equal rounds; give a multiple of "
            f"{num_ranks} microbatches"
        )
    return count


def split_layers(num_layers: int, num_stages: int, layers_per_stage: int | None = None) -> tuple[tuple[int, int], ...]:
    """Divide layers into stages whose lengths differ by at most one; earlier stages take the remainder.

    Returns (first layer, one past the last layer) of each stage, none longer than `layers_per_stage`.
    """
    if num_stages < 1 or num_layers < num_stages:
        raise ParallelSizeError(
            f"{num_layers} layers cannot be cut into {num_stages} stages, since each needs a layer; use fewer pipeline "
            "ranks, or fewer stages per rank"
        )
    length, remainder = divmod(num_layers, num_stages)
    longest = length + bool(remainder)
    if layers_per_stage is not None and longest > layers_per_stage:
        raise ParallelSizeError(
            f"{num_layers} layers in {num_stages} stages make stages of {longest}, more than "
            f"layers_per_stage={layers_per_stage}; use more stages"
        )
    starts = [stage * length + min(stage, remainder) for stage in range(num_stages + 1)]
    return tuple(itertools.pairwise(starts))


def count_stages(kind: ScheduleKind, num_layers: int, num_ranks: int, layers_per_stage: int | None = None) -> int:
    """Count the stages of a pipeline.

    Without `layers_per_stage` each rank has one, or two under a schedule of several; with it there are ceil(num_layers
    / layers_per_stage), which have to divide over the ranks as the schedule needs it.
    """
    if layers_per_stage is None:
        return num_ranks * (2 if kind.several_stages else 1)
    stages = -(-num_layers // layers_per_stage)
    made = f"{num_layers} layers with layers_per_stage={layers_per_stage} make {stages} stages"
    if stages % num_ranks:
        raise ParallelSizeError(
            f"{made}, no multiple of {num_ranks} pipeline ranks; change layers_per_stage or leave it None"
        )
    if kind.several_stages != (stages > num_ranks):
        wanted = "at least two stages" if kind.several_stages else "one stage"
        raise ParallelSizeError(
            f"{made}, {stages // num_ranks} on each of {num_ranks} ranks, but {kind.name} runs {wanted} per rank; "
            "change layers_per_stage or the schedule"
        )
    return stages
