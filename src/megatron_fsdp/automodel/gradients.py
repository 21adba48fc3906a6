"""Losses per token and gradients over ranks that have different numbers of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.automodel.gradient_clipping import Parts, clip_grad_norm_, gather_gradients
from megatron_fsdp.automodel.pipeline_parallel import Pipeline
from megatron_fsdp.errors import ConfigurationError

__all__ = [
    "clip_grad_norm_",
    "count_label_tokens",
    "per_token_factor",
    "scale_grads_and_clip_grad_norm",
    "scale_per_token_loss",
]

IGNORED_LABEL = -100
"""The label that counts for nothing, as in transformers and torch."""


def count_label_tokens(
    labels: Tensor | Iterable[Tensor], over: DeviceMesh | dist.ProcessGroup | None = None, *, shifted: bool
) -> int:
    """How many labels count towards the loss, on all ranks together; one all-reduce per mesh dimension.

    Args:
        labels: (batch, sequence), or those of several microbatches of one optimizer step.
        over: The ranks that have different tokens: data-parallel and context-parallel ones (the mesh "dp_cp", or
            mesh["dp", "cp"]), not tensor-parallel or pipeline ones. None: this rank alone.
        shifted: Whether they were shifted (`shift_labels`): label i belongs to the logits of token i. Otherwise, as
            transformers takes `labels`, the first label of each row belongs to no logits and does not count.

    Returns:
        The number, the same on all ranks of `over`.
    """
    several = [labels] if isinstance(labels, Tensor) else list(labels)
    counts = [((each if shifted else each[:, 1:]) != IGNORED_LABEL).sum() for each in several]
    if isinstance(over, DeviceMesh):
        groups, device = over.get_all_groups(), torch.device(over.device_type)
    else:
        groups, device = ([] if over is None else [over]), counts[0].device if counts else torch.device("cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    for count in counts:
        total += count.to(device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return int(total)


def per_token_factor(
    num_label_tokens: int, dp_group_size: int | None = None, gradients_are_summed: bool = False
) -> float:
    """What a rank's sum of token losses is multiplied by, so that gradients are those of the mean over all tokens.

    A strategy that averages gradients over R ranks makes `sum_r(g_r) / R` of the gradients `g_r` of the ranks' losses.
    With the losses `S_r * R / T`, where S_r is the sum over the rank's tokens and T the number of tokens of all ranks,
    that is the gradient of `sum_r(S_r) / T`, the mean over all tokens. Where gradients are summed the R falls away. A
    mean per rank would instead weigh tokens by how few their rank has.

    Args:
        num_label_tokens: T, of `count_label_tokens`: of all ranks and all microbatches of the step.
        dp_group_size: R, data-parallel times context-parallel ranks, all replicas included.
        gradients_are_summed: As by `calculate_per_token_loss=True`; then without `dp_group_size`.

    Returns:
        R / T, or 1 / T.

    Raises:
        ConfigurationError: No label counts, or the size is missing, below 1 or without effect.
    """
    if num_label_tokens < 1:
        raise ConfigurationError(
            f"num_label_tokens={num_label_tokens}, so there is no mean over tokens; skip batches without labels"
        )
    if gradients_are_summed:
        if dp_group_size is not None:
            raise ConfigurationError(
                f"dp_group_size={dp_group_size} has no effect where gradients are summed; leave it out, or set "
                "gradients_are_summed=False"
            )
        return 1.0 / num_label_tokens
    if dp_group_size is None or dp_group_size < 1:
        raise ConfigurationError(
            f"dp_group_size={dp_group_size} is not the number of ranks that gradients are averaged over; give "
            "data-parallel times context-parallel ranks, or gradients_are_summed=True"
        )
    return dp_group_size / num_label_tokens


def scale_per_token_loss(
    loss_sum: Tensor, num_label_tokens: int, *, dp_group_size: int | None = None, gradients_are_summed: bool = False
) -> Tensor:
    """The loss to call backward on, from the sum of this rank's token losses; see `per_token_factor`.

    Raises:
        ConfigurationError: As `per_token_factor`.
    """
    return loss_sum * per_token_factor(num_label_tokens, dp_group_size, gradients_are_summed)


def scale_grads_and_clip_grad_norm(
    parts: Parts,
    max_norm: float | None,
    *,
    num_label_tokens: int | None = None,
    dp_group_size: int | None = None,
    gradients_are_summed: bool = False,
    norm_type: float = 2.0,
    pp_mesh: DeviceMesh | None = None,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Make gradients of summed losses those of the mean over all tokens, then clip them.

    For loops that call backward on the plain sum of token losses, such as pipelines, which know the number of tokens
    of a step only when it is over. Losses that were scaled already want `num_label_tokens=None`.

    Args:
        parts: As `clip_grad_norm_`.
        max_norm: The largest norm allowed; None or infinity only measures.
        num_label_tokens: Tokens of all ranks and microbatches; None: gradients are not scaled.
        dp_group_size: As `per_token_factor`.
        gradients_are_summed: As `per_token_factor`.
        norm_type: As `clip_grad_norm_`.
        pp_mesh: As `clip_grad_norm_`.
        error_if_nonfinite: As `clip_grad_norm_`.
        foreach: As `clip_grad_norm_`.

    Returns:
        The norm after scaling and before clipping, as `clip_grad_norm_`.

    Raises:
        ConfigurationError: As `clip_grad_norm_` and `per_token_factor`; or sizes are given that have no effect.
        NonFiniteNormError: As `clip_grad_norm_`; gradients are scaled by then.
    """
    if num_label_tokens is not None:
        factor = per_token_factor(num_label_tokens, dp_group_size, gradients_are_summed)
        parts = parts if isinstance(parts, Tensor | torch.nn.Module | Pipeline) else list(parts)
        gather_gradients(parts).scale(factor, foreach)
    elif dp_group_size is not None or gradients_are_summed:
        raise ConfigurationError(
            "dp_group_size and gradients_are_summed have no effect without num_label_tokens; give it, or leave them out"
        )
    largest = math.inf if max_norm is None else max_norm
    return clip_grad_norm_(
        parts, largest, norm_type, pp_mesh=pp_mesh, error_if_nonfinite=error_if_nonfinite, foreach=foreach
    )
