"""How a microbatch is cut along its sequences over context-parallel ranks, and put together again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ContextCut:
    """The context-parallel ranks that this one belongs to; every method does nothing where it is alone.

    Attributes:
        mesh: One dimension; None: alone.
    """

    mesh: DeviceMesh | None = None

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def index(self) -> int:
        """Which of them this rank is."""
        return 0 if self.mesh is None else int(self.mesh.get_local_rank())

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of [samples, length]; ranks were given the same."""
        if self.mesh is None:
            return whole
        from megatron_fsdp.automodel.context_parallel import SequenceLayout  # imports transformers

        return SequenceLayout(self.size).cut(whole, self.index, 1)

    def positions(self, samples: int, length: int, device: torch.device) -> Tensor | None:
        """Positions in the whole sequence, [samples, length / ranks]; None where the model counts right by itself."""
        if self.mesh is None:
            return None
        return self.take(torch.arange(length, device=device).expand(samples, length)).contiguous()

    def join(self, part: Tensor) -> Tensor:
        """The whole of [samples, length / ranks], on every rank."""
        if self.mesh is None:
            return part
        from megatron_fsdp.automodel import unshard_sequence  # imports transformers

        return unshard_sequence(part, self.mesh)

    def add_up(self, share: Tensor) -> Tensor:
        """The sum over the ranks of a number, on every rank."""
        if self.mesh is not None:
            dist.all_reduce(share, group=self.mesh.get_group())
        return share
