"""The part of the wrapper for loops that drive communication by hand, as Megatron-LM's schedules do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.sync import SyncMode


class HandDriven:
    """Start, wait for and defer communication. Plain loops need none of this."""

    _engine: Engine
    _mode: SyncMode

    @property
    def suggested_AG_prefetch_size(self) -> int:  # noqa: N802 (the published name)
        """Elements gathered ahead of their use: those of the largest unit besides the root; 0: no prefetching."""
        return self._engine.scheduler.config.prefetch_forward * self._engine.largest_unit_numel

    @suggested_AG_prefetch_size.setter
    def suggested_AG_prefetch_size(self, numel: int) -> None:  # noqa: N802
        """0 turns prefetching off, any other size turns it on; there is room for one unit ahead."""
        self._engine.set_prefetch(numel > 0)

    @property
    def suggested_RS_queue_capacity(self) -> int:  # noqa: N802
        """Elements that may wait for their reduction: those of the two buckets, one filling and one on its way."""
        return 2 * self._engine.largest_unit_numel

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

        Args:
            force_sync: Wait for them here.
            force_dispatch: Accepted for callers that pass it; gathering always starts here.
        """
        self._engine.refresh_weights()
        self._engine.prefetch_weights(wait=force_sync)

    def synchronize_param_gather(self) -> None:
        """Wait for gathers under way."""
        for unit in self._engine.units:
            unit.wait()

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

    def broadcast_params(self) -> None:
        """Give every rank the weights of the first one, where ranks hold whole copies of main weights (strategy 0).

        Under the other strategies each part of the main weights exists once, so there is nothing to send.
        """
        self._engine.broadcast_whole_weights()

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
