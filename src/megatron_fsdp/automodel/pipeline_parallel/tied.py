"""Tied embeddings whose two ends are in different stages: two copies that start equal and get the same gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.errors import ConfigurationError


@dataclass
class TiedEnd:
    """One copy of a tied matrix: the input embeddings in the first stage, or the head in the last.

    Both ranks add up the gradients of both copies, so optimizers make the same updates of them. The sum of two numbers
    is the same in either order: copies stay equal bit for bit.
    """

    part: nn.Module  # the stage that has the copy
    name: str  # of the parameter in it
    group: dist.ProcessGroup  # of the pipeline
    peer: int  # rank in the group that has the other copy
    is_source: bool  # this is the input embeddings, whose values lead
    _kept: Tensor | None = field(default=None, init=False)

    @torch.no_grad()
    def equalize(self) -> None:
        """Give the head the values of the input embeddings; both ranks call it. Nothing on the meta device."""
        local = _local(self._param())
        if local.is_meta or not local.numel():
            return
        if self.is_source:
            dist.send(local.contiguous(), group=self.group, group_dst=self.peer)
        else:
            received = torch.empty_like(local)
            dist.recv(received, group=self.group, group_src=self.peer)
            local.copy_(received)

    def before_step(self) -> None:
        """Put gradients of steps before aside: they are sums already."""
        param = self._param()
        self._kept, param.grad = param.grad, None

    @torch.no_grad()
    def after_step(self) -> None:
        """Add the other copy's gradient of this step, and those of the steps before; both ranks call it."""
        param = self._param()
        if not param.requires_grad:
            return
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        own = _local(param.grad)
        if own.numel():
            other = torch.empty_like(own)
            ops = [
                dist.P2POp(dist.isend, own.clone(), group=self.group, group_peer=self.peer),
                dist.P2POp(dist.irecv, other, group=self.group, group_peer=self.peer),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            own.add_(other)
        if self._kept is not None:
            param.grad.add_(self._kept)
            self._kept = None

    def _param(self) -> nn.Parameter:
        """Return the parameter that the optimizer has; FSDP2 shows full ones after a forward that gathered them."""
        if isinstance(self.part, FSDPModule):
            self.part.reshard()
        return self.part.get_parameter(self.name)


def check_ends(end: TiedEnd | None, group: dist.ProcessGroup) -> None:
    """Make sure that both copies are cut alike over other mesh dimensions; all ranks of the pipeline call it."""
    own = None
    if end is not None:
        param = end.part.get_parameter(end.name)
        placements = repr(param.placements) if isinstance(param, DTensor) else ""
        own = (tuple(param.shape), tuple(_local(param).shape), str(param.dtype), placements)
    if len({found for found in gather_objects(own, group) if found is not None}) > 1:
        raise ConfigurationError(
            "the input embeddings and the head are tied, but their stages cut or cast them differently; give both "
            "the same tensor-parallel style, sharding and dtype, or set tie_word_embeddings=False"
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
