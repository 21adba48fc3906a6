"""`DistributedOptimizer`: gradient sync, clipping, step and gathers of a sharded model in one object."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_fsdp.comm.agreement import agreed
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fully_shard import fully_shard_optimizer, ranks_of_parameters
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.optim.optimizer import check_parameters, connect


class DistributedOptimizer(Optimizer):
    """A torch optimizer on the sharded main weights of a wrapped model, with clipping and communication.

    Its `step` finishes the gradient sync, clips by the norm of all gradients together, lets the wrapped optimizer step
    on this rank's shards, installs the new weights for compute, and starts gathering them for the next forward.

        model = fully_shard_model(model, ...)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, clip_grad=1.0)
        ...
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    It is a `torch.optim.Optimizer` with the groups, the state, the defaults and the hooks of the wrapped one, not with
    copies of them: learning-rate schedulers, `torch.distributed.checkpoint` and this package's checkpoints take either
    of the two, and a checkpoint saved with one loads into the other. Main weights in float32 under a bfloat16 model
    come from the model's `MixedPrecisionPolicy`; how state is cut, from its strategy.

    With `torch.amp.GradScaler` use it as any optimizer: the scaler unscales gradients before `step`, so that clipping
    sees their true norm, and skips the step on all ranks where any of them has found infinity. That is so for fused
    optimizers too, which torch would otherwise let unscale inside the step.

    Args:
        optimizer: Built on `model.parameters()` after wrapping, or what `fully_shard(model, optimizer)` handed back for
            one that was built before. Step either it or this object; only this one clips.
        model: The wrapped model. All its gradients together are clipped, those of other optimizers' parameters too.
        clip_grad: Largest 2-norm of all gradients; None or 0.0: they are not clipped.

    Attributes:
        inner_optimizer: The wrapped one.
        clip_grad: As given; may be changed between steps.
        grad_norm: The norm of all gradients in the last step before clipping, a scalar, the same on every rank; None
            before the first step, and where gradients are not clipped.

    Raises:
        ConfigurationError: `optimizer` wraps one already, or holds something else than parameters of `model`; `model`
            is not wrapped; `clip_grad` is negative, infinite or NaN.
    """

    _step_supports_amp_scaling = False  # a scaler that leaves unscaling to the step would have scaled gradients clipped

    @agreed("connecting the optimizer", lambda _self, optimizer=None, *_, **__: ranks_of_parameters(optimizer))
    def __init__(self, optimizer: Optimizer, model: MegatronFSDP, *, clip_grad: float | None = None) -> None:
        if not isinstance(model, MegatronFSDP):
            raise ConfigurationError(
                f"a DistributedOptimizer steps on the shards of a wrapped model, and this one is a "
                f"{type(model).__name__}; wrap it first, with fully_shard_model or DistributedDataParallel"
            )
        if isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"a {type(optimizer).__name__} cannot be wrapped in a DistributedOptimizer; give one of torch's, or of "
                "your own, built on model.parameters() after the model was wrapped"
            )
        check_parameters(optimizer, model._engine.sharded_names())
        _check_clip_grad(clip_grad)
        # The base class is not initialised: groups, state and hooks are those of the wrapped optimizer.
        self.inner_optimizer = fully_shard_optimizer(optimizer)
        self.clip_grad = clip_grad
        self.grad_norm: torch.Tensor | None = None
        self._model = model
        connect(self, model._engine)  # connecting it again would register the hooks of the wrapped one twice

    # ---- the step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights; collective.

        Args:
            closure: Computes the loss and its gradients. Optimizers that call it several times see current weights and
                clipped gradients each time.

        Returns:
            What the closure returns; None without one.
        """
        if closure is None:
            self._clip()
            loss = self.inner_optimizer.step()
        else:

            def clipped() -> Any:
                result = closure()
                self._clip()
                return result

            loss = self.inner_optimizer.step(clipped)
        engine = self._model._engine
        # A gather in flight would undo later writes to main weights that share its memory.
        if engine.options.overlap_param_gather and gathers_beside_main_weights(engine):
            self._model.start_param_sync()
        return loss

    def _clip(self) -> None:
        _check_clip_grad(self.clip_grad)
        self.grad_norm = self._model.clip_grad_norm_(self.clip_grad) if self.clip_grad else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, unreduced ones included."""
        self.inner_optimizer.zero_grad(set_to_none=set_to_none)

    def count_zeros(self) -> int:
        """Count the zeros of all gradients, each element once over all ranks. Collective."""
        self._model._engine.sync_if_unreduced()
        total = self._model.gradient_statistics().total
        return round(total.zero_fraction * total.numel) if total.numel else 0

    # ---- what the wrapped optimizer has -----------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.inner_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer by parameter; tensors sharded like their parameter are DTensors."""
        return self.inner_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner_optimizer.state = state

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped optimizer's attribute, such as defaults and hooks."""
        if name == "inner_optimizer":
            raise AttributeError(name)
        return getattr(self.inner_optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        return self.inner_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of this or of the wrapped optimizer."""
        self.inner_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add further parameters of the model, as torch's method does.

        Args:
            param_group: With "params", sharded parameters of the model, and options.

        Raises:
            ConfigurationError: Some are not parameters of the model; nothing is added.
        """
        given: Any = param_group
        params = given.get("params") if isinstance(given, dict) else None
        if params is None or isinstance(params, set):
            self.inner_optimizer.add_param_group(param_group)  # torch raises for it
            return
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        known = self._model._engine.sharded_names()
        unnamed = [param[1] if isinstance(param, tuple) else param for param in listed]
        for index, param in enumerate(unnamed):
            if id(param) not in known:
                raise ConfigurationError(
                    f"parameter {index} of the new group (shape {tuple(param.shape)}) is none of the wrapped model's, "
                    "so stepping it would train nothing; add parameters out of model.parameters()"
                )
        self.inner_optimizer.add_param_group({**param_group, "params": listed})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse; shards and process groups belong to this process."""
        raise ConfigurationError(
            "a DistributedOptimizer cannot be pickled or copied; save optimizer.state_dict() with "
            "torch.distributed.checkpoint, or use save_checkpoint"
        )


def gathers_beside_main_weights(engine: Engine) -> bool:
    """Return True if no all-gather writes into main weights, so that both may be used at a time.

    Else an all-gather in flight would undo what is written into main weights meanwhile.
    """
    return not any(
        group.weights.main_lies_in_compute
        and (group.plan.gathers_outer or (group.plan.needs_all_gather and not group.plan.shards_compute_weights))
        for group in engine.groups()
    )


def _check_clip_grad(clip_grad: object) -> None:
    if clip_grad is None:
        return
    is_number = isinstance(clip_grad, int | float) and not isinstance(clip_grad, bool)
    if not is_number or not (clip_grad >= 0 and math.isfinite(clip_grad)):  # type: ignore[operator, arg-type]
        raise ConfigurationError(f"clip_grad={clip_grad!r} is not a limit; give a positive number, or None not to clip")
