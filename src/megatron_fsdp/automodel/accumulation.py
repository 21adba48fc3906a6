"""Gradient accumulation that reads the same for every strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megatron_fsdp.automodel.pipeline_parallel import Pipeline
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.megatron_fsdp import MegatronFSDP

_DEFERS = "_defers_grad_sync"


def remember_deferral(model: nn.Module, defers: bool) -> None:
    """Note on a model what its configuration says, for `accumulation_context`."""
    setattr(model, _DEFERS, defers)


@contextlib.contextmanager
def accumulation_context(
    model: nn.Module | Pipeline, is_last_microbatch: bool, *, defer_grad_sync: bool | None = None
) -> Iterator[None]:
    """Run forward and backward of one microbatch; gradients are reduced over ranks after the last one.

    Args:
        model: What a manager, `from_pretrained` or `from_config` returned (not a pipeline, which has all microbatches
            of a step inside).
        is_last_microbatch: Whether the optimizer steps after this one.
        defer_grad_sync: False: reduce after every microbatch (less memory, more communication). None: what
            `FSDP2Config.defer_fsdp_grad_sync` said when the model was made parallel; True for the other strategies.

    Raises:
        ConfigurationError: The model is of none of the strategies.
    """
    if isinstance(model, Pipeline):
        raise ConfigurationError(
            "a Pipeline has all microbatches of a step inside; call model.step(input_ids, labels) once for each "
            "optimizer step"
        )
    defers = getattr(model, _DEFERS, True) if defer_grad_sync is None else defer_grad_sync
    reduces = is_last_microbatch or not defers
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduces)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, MegatronFSDP | nn.parallel.DistributedDataParallel):
        with contextlib.nullcontext() if reduces else model.no_sync():
            yield
    else:
        raise ConfigurationError(
            f"the model is a {type(model).__name__}; give what a manager, from_pretrained or from_config returned"
        )
