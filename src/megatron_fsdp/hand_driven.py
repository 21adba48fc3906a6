"""The part of the wrapper for loops that drive communication by hand, as Megatron-LM's schedules do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.param_and_grad_buffer import AllGatherPipeline, GradReducePipeline, ParamAndGradBuffer
from megatron_fsdp.runtime.assemble import Switches
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.participation import calls_of, take_part
from megatron_fsdp.runtime.sync import SyncMode


class HandDriven:
    """Start, wait for and defer communication. Plain loops need none of this."""

    _engine: Engine
    _switches: Switches
    _mode: SyncMode
    module: nn.Module
    device: torch.device
    _gathers_at_once = False  # `start_param_sync` waits for what it starts

    @property
    def param_and_grad_buffer(self) -> ParamAndGradBuffer:
        """The flat buffers."""
        return ParamAndGradBuffer(self._engine)

    @property
    def all_gather_pipeline(self) -> AllGatherPipeline:
        """Gathers by hand."""
        return AllGatherPipeline(self._engine)

    @property
    def grad_reduce_pipeline(self) -> GradReducePipeline:
        """Reductions by hand."""
        return GradReducePipeline(self._engine)

    @property
    def suggested_AG_prefetch_size(self) -> int:  # noqa: N802 (the published name)
        """Elements gathered ahead of their use: units ahead, times the largest unit; 0: no prefetching.

        Setting it gathers as many units ahead as fit, at least one for any size but 0, in both directions. The number
        of slots grows with it (and does not shrink again), unless `max_gathered_units` or a double buffer fixes it.
        """
        return self._engine.scheduler.config.prefetch_forward * self._engine.largest_unit_numel

    @suggested_AG_prefetch_size.setter
    def suggested_AG_prefetch_size(self, numel: int) -> None:  # noqa: N802
        self._engine.set_prefetch(numel)

    @property
    def suggested_RS_queue_capacity(self) -> int:  # noqa: N802
        """Elements that may fill buckets or be in reduction at a time: buckets, times the largest unit.

        Setting it changes the number of buckets: as many as fit, at least one (then every reduction is waited for
        before the next unit's gradients come).
        """
        return self._engine.executor.bucket_count * self._engine.largest_unit_numel

    @suggested_RS_queue_capacity.setter
    def suggested_RS_queue_capacity(self, numel: int) -> None:  # noqa: N802
        self._engine.set_reduce_capacity(numel)

    @property
    def max_gathered_units(self) -> int:
        """How many units besides the root are gathered at a time, as of now (strategy 3)."""
        return self._engine.scheduler.config.slots

    def start_grad_sync(self, *_unused: Any) -> None:
        """Reduce gradients that were deferred; nothing to do where they were reduced during backward."""
        self._engine.flush_deferred()

    def synchronize_gradient_reduce(self) -> None:
        """Wait until every gradient is reduced."""
        self._engine.flush_deferred()

    def attach_grad_to_optimizer_state(self) -> None:
        """Make reduced gradients visible as `.grad` of the sharded parameters."""
        self._engine.attach_gradients()

    def start_param_sync(self, *_unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:  # noqa: ARG002
        """Start gathering weights ahead of the next forward, as far as there is room for them.

        With `fsdp_all_gather_in_start_param_sync=False` of the config they are gathered here, one unit after another,
        and nothing is under way when this returns.

        Args:
            force_sync: Wait for them here, whatever the config says.
            force_dispatch: Accepted for callers that pass it; gathering always starts here.
        """
        self._engine.refresh_weights()
        self._engine.prefetch_weights(wait=force_sync or self._gathers_at_once)

    @property
    def gathers_ahead(self) -> bool:
        """Whether weights are gathered while the forward runs."""
        return self._switches.overlap_param_gather

    @property
    def may_gather_between_steps(self) -> bool:
        """Whether `start_param_sync` may be called before main weights are left alone until the next forward.

        False where weights are gathered in place, around main weights (strategies 1 and 2 without main weights of their
        own): what is written into main weights while a gather is under way could be lost there.
        """
        return self._engine.gathers_beside_main_weights

    def synchronize_param_gather(self) -> None:
        """Wait for gathers under way."""
        self._engine.await_weights()

    def all_gather_and_wait_parameters_ready(
        self,
        params: Iterable[nn.Parameter],
        prefetch: bool = True,  # noqa: ARG002
        prefetch_order: Any = None,  # noqa: ARG002
        wait_bucket_ready: bool = True,
        bwd: bool = False,  # noqa: ARG002
    ) -> None:
        """Gather the units of some parameters (sharded or full ones) and wait for them.

        Args:
            params: Whose units.
            prefetch: Accepted; the units given are all that is gathered.
            prefetch_order: Accepted, as above.
            wait_bucket_ready: Wait for the weights, else only start.
            bwd: Accepted; weights are the same in both directions.
        """
        self._engine.gather_units_of(params, wait=wait_bucket_ready)

    def post_forward_release_module(self, module: nn.Module, *_unused: Any) -> None:
        """Let go of the gathered weights of a module's units, unless they are in use; never the root's."""
        self._engine.release_units_of(module.parameters())

    def post_backward_release_module(self, module: nn.Module, *_unused: Any) -> None:
        """As `post_forward_release_module`."""
        self._engine.release_units_of(module.parameters())

    def pre_backward(self, module: nn.Module, *_unused: Any) -> None:
        """Gather the weights of a module's units ahead of their backward and wait for them."""
        self._engine.gather_units_of(module.parameters(), wait=True)

    def post_backward(self, module: nn.Module, *_unused: Any) -> None:
        """Reduce the gradients of a module's units that have arrived, without waiting for the others."""
        self._engine.reduce_units_of(module.parameters())

    def backward_dw(self) -> None:
        """Compute weight gradients that were delayed now, in place of at the end of backward.

        Raises:
            ConfigurationError: `delay_wgrad_compute` is off, so there are none.
        """
        if self._engine.delayed is None:
            raise ConfigurationError(
                "backward_dw was called with delay_wgrad_compute=False, where no weight gradient is delayed; set it "
                "in the configuration"
            )
        self._engine.delayed.run()

    def broadcast_params(self) -> None:
        """Give every rank the weights of the first one, where ranks hold whole copies of main weights (strategy 0).

        Under the other strategies each part of the main weights exists once, so there is nothing to send.
        """
        self._engine.broadcast_whole_weights()

    # ---- ranks without data -----------------------------------------------------------------------------------------

    def take_part(
        self,
        module: nn.Module | None = None,
        hidden: torch.Tensor | None = None,
        order: Sequence[nn.Module] | None = None,
    ) -> torch.Tensor:
        """Take part in the communication of a module's units without calling it, on a rank that has no data for it.

        Call it where the other ranks call the module: it gathers what they gather, and when the gradient of the result
        comes, it gathers and reduces as their backward does, with gradients of zero.

            hidden = hidden + expert(hidden) if chosen else model.take_part(expert, hidden)
            loss = loss_of(model(batch)) if batch is not None else model.take_part()

        Args:
            module: Part of the model, or None for a whole forward (the model itself).
            hidden: What the module would be called on, or any floating-point tensor on which the loss depends; None: a
                new zero, to be added to the loss. A frozen module has a backward only where `hidden` requires grad.
            order: Modules within it in the order that their forward calls them; None: the order of registration.

        Returns:
            `hidden`, unchanged in value; without it a scalar zero.

        Raises:
            ConfigurationError: A module is not part of the model.
            ScheduleError: `hidden` cannot carry a gradient.
        """
        calls = calls_of(self._engine, self.module, module, order)
        return take_part(self._engine, calls, torch.zeros((), device=self.device) if hidden is None else hidden)

    # ---- microbatches -------------------------------------------------------------------------------------------

    @property
    def has_deferred_gradients(self) -> bool:
        """Whether sums wait to be reduced: by the next backward that synchronises, or by `finish_grad_sync`."""
        gradients = [group.gradients for group in self._engine.groups() if group.gradients is not None]
        return any(found.has_deferred or found.has_pending for found in gradients)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer every reduction of backwards in this block; the next synchronising backward reduces the sum.

        So does the step of a connected optimizer. Costs one full gradient in `main_grads_dtype`. The previous state is
        restored on exit.
        """
        with self._mode.changed(is_last_microbatch=False, defer_all=True):
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Synchronise after every backward in this block; the previous state is restored on exit."""
        with self._mode.changed(auto_sync=True, defer_all=False):
            yield

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Choose whether every backward ends with a gradient sync."""
        self._mode.auto_sync = sync_model
