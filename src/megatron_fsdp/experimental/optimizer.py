"""Optimizers of modules that were sharded one by one."""

from __future__ import annotations

import torch
from torch import nn

from megatron_fsdp.errors import NotSupportedYetError
from megatron_fsdp.optim.optimizer import connect_with_hooks
from megatron_fsdp.optim.step import engine_of, params_of


def fully_shard_optimizer(optimizer: torch.optim.Optimizer, *, precision_aware: bool = False) -> None:
    """Connect an optimizer that was built on sharded parameters; its groups and its other parameters stay as they are.

    Its step installs the new weights. Sharded parameters show gradients in their own dtype, so that any optimizer can
    step them.

    Args:
        optimizer: Built after `fully_shard`.
        precision_aware: The optimizer takes gradients in the dtype in which they are accumulated.

    Raises:
        TypeError: A group holds something else than parameters.
        NotSupportedYetError: `precision_aware` where gradients are accumulated in another dtype than main weights (a
            NotImplementedError).
    """
    params = params_of(optimizer)
    for param in params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"the optimizer holds a {type(param).__name__}; build it on the module's parameters")
    engines = list(dict.fromkeys(engine_of(param) for param in params if hasattr(param, "_fsdp_engine")))
    if precision_aware and any(
        group.plan.precision.main_grads != group.plan.precision.main_params
        for engine in engines
        for group, _ in engine.groups_with_gradients()
    ):
        raise NotSupportedYetError(
            "precision_aware=True asks for gradients in the dtype they are accumulated in, and sharded parameters show "
            "them in their own; set main_grads_dtype and main_params_dtype of the policy alike, or leave it out"
        )
    if engines:
        connect_with_hooks(optimizer, engines, True, "MixedPrecisionPolicy(main_params_dtype=torch.float32)")
