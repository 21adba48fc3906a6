"""What a step is given: checked, agreed on by the ranks of a pipeline, ready to be cut into microbatches."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.automodel.pipeline_parallel.token_loss import shift
from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step.

    Attributes:
        input_ids: (rows, sequence).
        labels: Of the same positions (shifted), (rows, sequence); None: none were given.
        per_token: What the model takes besides; tensors have all rows.
    """

    input_ids: Tensor
    labels: Tensor | None
    per_token: dict[str, Any]


def take_inputs(
    input_ids: Tensor, labels: Tensor | None, per_token: dict[str, Any], vocabulary: int | None = None
) -> StepInputs:
    """Check the inputs of a step and shift the labels.

    Args:
        input_ids: (rows, sequence).
        labels: (rows, sequence), not yet shifted, or None.
        per_token: `shift_labels` (rows, sequence) in place of `labels`, and what the model takes besides; tensors with
            a first dimension of 1 or rows. None is as if not given.
        vocabulary: How many tokens there are; None: not known.

    Raises:
        ConfigurationError: Shapes or tokens do not fit, something is no tensor, or there are two kinds of labels.
    """
    others = {name: value for name, value in per_token.items() if value is not None}
    shifted = others.pop("shift_labels", None)
    if input_ids.ndim != 2:
        raise ConfigurationError(f"input_ids has shape {tuple(input_ids.shape)} but has to be (rows, sequence)")
    if vocabulary is not None and input_ids.numel():
        low, high = (int(value) for value in input_ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ConfigurationError(
                f"input_ids has tokens from {low} to {high}, and the model knows 0 to {vocabulary - 1}"
            )
    if labels is not None and shifted is not None:
        raise ConfigurationError("labels and shift_labels were both given; give one of them")
    for name, value in (("labels", labels), ("shift_labels", shifted)):
        if value is not None and value.shape != input_ids.shape:
            raise ConfigurationError(
                f"{name} has shape {tuple(value.shape)} but has to have that of input_ids, {tuple(input_ids.shape)}"
            )
    rows = input_ids.shape[0]
    for name, value in others.items():
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"{name}={value!r} has no effect in a pipeline, whose stages take tensors per token only "
                "(attention_mask, position_ids); leave it out"
            )
        if value.ndim == 0 or value.shape[0] not in (1, rows):
            raise ConfigurationError(
                f"{name} has shape {tuple(value.shape)} but its first dimension has to be the {rows} rows of "
                "input_ids (or 1), since it is cut into microbatches by rows"
            )
        others[name] = value.expand(rows, *value.shape[1:])
    return StepInputs(input_ids, shift(labels) if labels is not None else shifted, others)


def agreed_inputs(
    input_ids: Tensor,
    labels: Tensor | None,
    per_token: dict[str, Any],
    call: tuple[Any, ...],
    group: dist.ProcessGroup,
    device: torch.device,
    vocabulary: int | None = None,
) -> StepInputs:
    """`take_inputs`, and make sure that all ranks of a pipeline take the same step; one small all-reduce.

    A rank that got other shapes would wait for tensors that nobody sends.

    Args:
        input_ids: As for `take_inputs`.
        labels: As for `take_inputs`.
        per_token: As for `take_inputs`.
        call: What else has to be the same, of types that `repr` tells apart.
        group: Of the pipeline.
        device: Of the group's collectives.
        vocabulary: As for `take_inputs`.

    Raises:
        ConfigurationError: Inputs do not fit on some rank, or ranks differ; on all ranks.
    """
    try:
        inputs, problem = take_inputs(input_ids, labels, per_token, vocabulary), None
    except ConfigurationError as error:
        inputs, problem = None, error
    own = [int(problem is not None), *(_described(inputs, call) if inputs is not None else [0] * len(_NAMES))]
    both = torch.tensor([*own, *(-value for value in own)], dtype=torch.int64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    values: list[int] = both.tolist()
    (problems, *most), (_, *least) = values[: len(own)], [-value for value in values[len(own) :]]
    if problem is not None:
        raise problem
    if problems:
        raise ConfigurationError("another rank of the pipeline was given inputs that do not fit; see its message")
    if most != least:
        found = [f"{name} {low} and {high}" for name, low, high in zip(_NAMES, least, most, strict=True) if low != high]
        raise ConfigurationError(
            f"the ranks of a pipeline were given different steps ({', '.join(found)}); give all ranks of a pipeline "
            "the same batch and the same arguments"
        )
    assert inputs is not None
    return inputs


_NAMES = ("rows", "sequence", "labels given", "checksum of tokens", "checksum of labels", "checksum of other arguments")


def _described(inputs: StepInputs, call: tuple[Any, ...]) -> list[int]:
    others = [(name, tuple(value.shape), str(value.dtype)) for name, value in sorted(inputs.per_token.items())]
    rows, sequence = inputs.input_ids.shape
    tokens, labels = (0 if ids is None else _checksum(ids) for ids in (inputs.input_ids, inputs.labels))
    return [rows, sequence, int(inputs.labels is not None), tokens, labels, zlib.crc32(repr((others, call)).encode())]


def _checksum(ids: Tensor) -> int:
    """Of the values of integers, in their order."""
    weights = torch.arange(1, ids.numel() + 1, device=ids.device) % _PRIME
    return int(((ids.flatten().long() % _PRIME) * weights).sum())


_PRIME = 65_521
