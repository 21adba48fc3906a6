"""The forward of divided experts: tokens go to the ranks that hold their experts, and what these make of them returns.

One call, T tokens with k experts each, P expert-parallel ranks with E experts each:

1. Each token is repeated k times, and the T*k rows are sorted by expert; so they are sorted by rank as well.
2. The ranks tell each other how many rows come for which expert: P*E integers (all-to-all 1).
3. Rows go to the ranks of their experts (all-to-all 2; splits are uneven and may be zero).
4. transformers' own forward computes them: E experts, one expert for each row, weight 1.
5. Rows return (all-to-all 3), are put back in order, weighted and summed over k.

Backward runs 3 and 5 the other way: two all-to-alls. Weights of the router never leave their rank, so their gradients
are complete there. No sum has an order that depends on timing. Every rank of the group must call the module equally
often; a rank may have no tokens, and none may come to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ExpertShare:
    """What a rank has of the experts of a layer.

    Attributes:
        mesh: One-dimensional, of the expert-parallel ranks.
        num_local: Experts of each rank; rank r of the mesh has those from r * num_local on.
    """

    mesh: DeviceMesh
    num_local: int


class DividedExperts(nn.Module):
    """What the class of an experts module is put under when its experts are divided over ranks.

    As torch's `fully_shard` does, the module keeps its identity and gets a class of its own, made of this one and its
    former one; so names of parameters, and `isinstance`, stay as they were.
    """

    expert_share: ExpertShare

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """What the undivided module computes; collective over the expert-parallel ranks.

        Args:
            hidden_states: (T, hidden), this rank's tokens.
            top_k_index: (T, k), chosen experts, numbered over all ranks.
            top_k_weights: (T, k), what the experts' outputs are multiplied by.

        Returns:
            (T, hidden), dtype of `hidden_states`.
        """
        num_chosen = top_k_index.shape[-1]
        order = torch.argsort(top_k_index.flatten(), stable=True)
        plan = _plan_exchange(top_k_index, self.expert_share)
        rows = hidden_states.repeat_interleave(num_chosen, dim=0)[order]
        computed = self._compute(plan.forth(rows), plan.local_index)
        returned = plan.back(computed)[torch.argsort(order)]
        weighted = returned.view(*top_k_index.shape, hidden_states.shape[-1]) * top_k_weights.unsqueeze(-1)
        return weighted.sum(dim=-2).to(hidden_states.dtype)

    def _compute(self, rows: Tensor, local_index: Tensor) -> Tensor:
        """Each row by the expert of its index; (rows, hidden) in the same order and dtype."""
        share = self.expert_share
        stand_in = object.__new__(type(self))  # all of this module but with this rank's weights: not one attribute of
        stand_in.__dict__.update(self.__dict__)  # it changes, so recomputation may run while something else reads it
        weights = {name: _local(param) for name, param in self._parameters.items() if param is not None}
        stand_in.__dict__.update(weights, num_experts=share.num_local)
        if rows.shape[0] == 0:  # FSDP2 reduces what has a gradient, and must find the same on all ranks: zeros here
            return rows + torch.stack([weight.flatten()[:0].sum() for weight in weights.values()]).sum().to(rows.dtype)
        ones = rows.new_ones(rows.shape[0], 1)
        computed: Tensor = super(DividedExperts, stand_in).forward(rows, local_index.unsqueeze(-1), ones)
        return computed.to(rows.dtype)


def _local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


@dataclass(frozen=True)
class _Exchange:
    """How many rows go where.

    Attributes:
        group: The expert-parallel ranks.
        sent: Rows of this rank for each rank.
        received: Rows of each rank for this one.
        local_index: (rows received,), expert of each, numbered on this rank.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    local_index: Tensor

    def forth(self, rows: Tensor) -> Tensor:
        """Rows to the ranks of their experts."""
        return wait_tensor(all_to_all_single_autograd(rows, self.received, self.sent, self.group))

    def back(self, rows: Tensor) -> Tensor:
        """Rows to where they came from."""
        return wait_tensor(all_to_all_single_autograd(rows, self.sent, self.received, self.group))


@torch.no_grad()
def _plan_exchange(top_k_index: Tensor, share: ExpertShare) -> _Exchange:
    """Count rows and tell the other ranks; one all-to-all, and one wait of the host for the device."""
    group, num_ranks = share.mesh.get_group(), share.mesh.size()
    counts = torch.zeros(num_ranks * share.num_local, dtype=torch.int64, device=top_k_index.device)
    chosen = top_k_index.flatten().long()
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    per_rank = torch.stack([counts, arriving]).view(2, num_ranks, share.num_local)
    sent, received = per_rank.sum(dim=-1).tolist()
    experts = torch.arange(share.num_local, device=counts.device).repeat(num_ranks)
    return _Exchange(group, sent, received, experts.repeat_interleave(arriving, output_size=sum(received)))
