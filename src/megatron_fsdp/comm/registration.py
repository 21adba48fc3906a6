"""Registration of communication memory with NCCL (user buffers).

NCCL reads and writes registered memory itself, without copies through buffers of its own; with symmetric windows (the
same offset on every rank) its collectives need fewer multiprocessors, too. The memory comes from NCCL's own allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_fsdp.comm.agreement import all_agree
from megatron_fsdp.comm.collectives import Axis, backend_of, is_simulated
from megatron_fsdp.errors import ConfigurationError


class UserBuffers:
    """The communication memory of one model, registered if its back ends can.

    Collectives of `axes` use it, which are the same in the same order on every rank; the groups `reaching_all` reach
    every rank together. `symmetric` registers symmetric windows where torch knows how to.
    """

    def __init__(
        self,
        axes: Sequence[Axis],
        reaching_all: Sequence[dist.ProcessGroup | None],
        device: torch.device,
        symmetric: bool,
    ) -> None:
        found = (group for axis in axes for group in (axis.group, axis.gather_group) if axis.num_ranks > 1)
        self._groups = [group for group in dict.fromkeys(found) if group is not None]
        self._reaching_all = reaching_all
        self._device = device
        self._symmetric = symmetric
        self._pool: Any = None
        # why nothing can be registered here, in words; empty where it can
        self.unsupported_reason = _unsupported_reason(self._groups, device)
        self.is_registered = False
        self.num_bytes = 0  # of the memory, once there is some

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate zeros of uint8, from the back end's allocator if they can be registered."""
        self.num_bytes = num_bytes
        if self.unsupported_reason:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._pool = torch.cuda.MemPool(_backend(self._groups[0], self._device).mem_allocator)
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def register(self) -> None:
        """Register the memory with every group, once, if the back ends can. Collective.

        Where the library refuses on one rank, every rank raises.
        """
        if self.unsupported_reason:
            return
        done: list[dist.ProcessGroup] = []
        weakref.finalize(self, _deregister, self._pool, done, self._device).atexit = False
        with all_agree("registering communication memory", self._reaching_all):
            try:
                for group in self._groups:
                    dist.barrier(group, device_ids=[self._device.index])  # NCCL connects at its first collective
                    backend = _backend(group, self._device)
                    windows = {"symm": self._symmetric} if _knows_windows(backend) else {}
                    backend.register_mem_pool(self._pool, **windows)
                    done.append(group)
            except RuntimeError as error:
                remedy = "set disable_symmetric_registration=True, or leave nccl_ub out"
                raise ConfigurationError(
                    f"NCCL refused to register {self.num_bytes:,} bytes of communication memory "
                    f"({str(error).splitlines()[0]}); {remedy if self._symmetric else 'leave nccl_ub out'}"
                ) from error
        self.is_registered = True

    @property
    def note(self) -> str:
        """The state of registration, in one sentence."""
        taken = f"{self.num_bytes:,} bytes of communication memory are taken once and keep their addresses"
        if self.unsupported_reason:
            return f"nccl_ub: {taken}, but nothing is registered, since {self.unsupported_reason}"
        if not self.is_registered:
            return f"nccl_ub: {taken}; call manual_buffer_registration() to register them"
        knows = _knows_windows(_backend(self._groups[0], self._device))
        how = "with symmetric windows" if self._symmetric and knows else "conventionally"
        if self._symmetric and not knows:
            how += ", since this torch's register_mem_pool knows no symmetric windows"
        return f"nccl_ub: {taken}; they are registered with NCCL {how}"


def _unsupported_reason(groups: Sequence[dist.ProcessGroup], device: torch.device) -> str:
    """Return the reason that memory cannot be registered with all groups; empty if it can."""
    if not groups:
        return "there is only one rank, which sends nothing"
    for group in groups:
        if device.type != "cuda" or is_simulated(group):
            return f"ranks communicate by {backend_of(group)} on {device.type}, and only NCCL registers memory"
        backend = _backend(group, device)
        try:
            if not all(hasattr(backend, name) for name in ("register_mem_pool", "mem_allocator")):
                return f"this torch cannot register memory with {backend_of(group)}"
        except RuntimeError as error:  # the allocator is looked for when it is asked for
            return f"NCCL has no memory here that can be registered ({str(error).splitlines()[0]})"
    return ""


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    return group._get_backend(device)


def _knows_windows(backend: Any) -> bool:
    """Return True if `register_mem_pool` takes `symm`; only its docstring has its signature."""
    return "symm" in (backend.register_mem_pool.__doc__ or "")


def _deregister(pool: Any, groups: list[dist.ProcessGroup], device: torch.device) -> None:
    """Deregister a pool from the groups that still exist."""
    for group in groups:
        if dist.is_initialized() and group in distributed_c10d._world.pg_map:
            with suppress(RuntimeError):
                _backend(group, device).deregister_mem_pool(pool)
