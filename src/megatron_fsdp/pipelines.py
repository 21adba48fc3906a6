"""What clients find behind `param_and_grad_buffer`, `all_gather_pipeline` and `grad_reduce_pipeline`: thin views."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.unit.param_group import ParameterGroup


class ParamAndGradBuffer:
    """The flat buffers of a sharded model; live, and owned by the model.

    Args:
        engine: Of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def parameter_groups(self) -> list[ParameterGroup]:
        """All parameter groups, in unit order."""
        return self._engine.groups()

    @property
    def optimizer_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Canonical name and sharded parameter of everything trainable: what an optimizer updates."""
        return [
            (name, param)
            for group in self._engine.groups()
            if group.gradients is not None
            for name, param in zip(group.names, group.sharded, strict=True)
        ]

    def update_main_grads(self) -> None:
        """Make reduced gradients visible as `.grad` of the sharded parameters."""
        self._engine.attach_gradients()

    def zero_grad(self) -> None:
        """Forget all gradients, deferred ones included."""
        self._engine.clear_gradients()

    def copy_main_weights_to_model_weights(self) -> None:
        """Bring compute weights up to date with main weights."""
        self._engine.install_main_weights()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients, visible and deferred, by a factor."""
        for group in self._engine.groups():
            if group.gradients is not None:
                group.gradients.scale(scaling_factor, group.sharded)


class AllGatherPipeline:
    """Gathers of a sharded model.

    Args:
        engine: Of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def all_gather_params(self, params: Iterable[nn.Parameter]) -> None:
        """Start gathering the units that own some parameters, sharded or full ones."""
        self._engine.gather_units_of(params, wait=False)

    def wait_params(self, params: Iterable[nn.Parameter]) -> None:
        """Gather those units, where they are not gathered yet, and wait for them."""
        self._engine.gather_units_of(params, wait=True)

    def release_params(self, params: Iterable[nn.Parameter]) -> None:
        """Let go of those units' gathered weights, unless they are in use."""
        self._engine.release_units_of(params)


class GradReducePipeline:
    """Reductions of a sharded model.

    Args:
        engine: Of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reduce_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Reduce now what has arrived for the units that own some parameters."""
        self._engine.reduce_units_of(params)

    def wait_for_previous_grad_reduce(self) -> None:
        """Reduce what was deferred, and wait for every reduction."""
        self._engine.flush_deferred()
