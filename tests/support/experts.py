"""A mixture of experts, and arrangements in which each rank holds a part of the experts and sends tokens to others."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from tests.support.arrangements import Arrangement, Values, flattened, hybrid_arguments, mesh_of
from tests.support.zoo import TinyTransformer

_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor  # torch 2.11


class Experts(nn.Module):
    """Expert MLPs with fused weights: up (experts, features, hidden), down (experts, hidden, features)."""

    def __init__(self, experts: int, features: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, features, hidden) / features**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, features) / hidden**0.5)
        self.shift = nn.Parameter(0.1 * torch.randn(experts, features))

    def forward(self, rows: Tensor, expert: Tensor) -> Tensor:
        """rows (rows, features) of local experts (rows,) -> (rows, features)."""
        hidden = F.gelu(rows.unsqueeze(1) @ self.up[expert])
        return (hidden @ self.down[expert]).squeeze(1) + self.shift[expert]


class ListedExperts(nn.ModuleList):
    """The same as modules of their own; one without tokens is not called, so its parameters get no gradient."""

    def __init__(self, experts: int, features: int, hidden: int) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features)) for _ in range(experts)
        )

    def forward(self, rows: Tensor, expert: Tensor) -> Tensor:
        """rows (rows, features) of local experts (rows,) -> (rows, features)."""
        out = torch.zeros_like(rows)
        for index, module in enumerate(self):
            chosen = (expert == index).nonzero().squeeze(-1)
            if len(chosen):
                out = out.index_copy(0, chosen, module(rows[chosen]))
        return out


ExpertsKind = type[Experts] | type[ListedExperts]


class MixtureOfExperts(nn.Module):
    """Router and experts; (..., features) in and out. Every token reaches its `top_k` experts, none is dropped."""

    def __init__(
        self, features: int, experts: int, top_k: int, experts_name: str = "experts", kind: ExpertsKind = Experts
    ) -> None:
        super().__init__()
        self.router = nn.Linear(features, experts, bias=False)
        self.experts_name = experts_name
        self.add_module(experts_name, kind(experts, features, features))
        self.num_experts = experts
        self.top_k = top_k
        self.closed = 0  # how many experts, the last ones, are never chosen
        self.group: dist.ProcessGroup | None = None

    def divide(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's consecutive part of the experts."""
        self.group = group
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        held = self.get_submodule(self.experts_name)
        if isinstance(held, ListedExperts):
            count = len(held) // ranks
            del held[(rank + 1) * count :], held[: rank * count]
        else:
            for name, param in list(held.named_parameters()):
                setattr(held, name, nn.Parameter(param.detach().chunk(ranks)[rank].clone()))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens)
        is_closed = torch.arange(self.num_experts) >= self.num_experts - self.closed
        gates, chosen = scores.masked_fill(is_closed, -torch.inf).softmax(-1).topk(self.top_k)
        order = chosen.flatten().argsort(stable=True)
        rows = tokens.repeat_interleave(self.top_k, 0)[order]
        answers = self._ask(rows, torch.bincount(chosen.flatten(), minlength=self.num_experts))
        back = torch.zeros_like(rows).index_copy(0, order, answers).unflatten(0, (-1, self.top_k))
        return (back * gates.unsqueeze(-1)).sum(1).view_as(x)

    def _ask(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (rows, features), ordered by expert, counts (experts,) -> the experts' answers in the same order."""
        held = self.get_submodule(self.experts_name)
        if self.group is None:
            return held(rows, torch.arange(self.num_experts).repeat_interleave(counts))
        ranks = dist.get_world_size(self.group)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        by_rank = received.view(ranks, -1)
        sent_sizes, received_sizes = counts.view(ranks, -1).sum(1).tolist(), by_rank.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows.contiguous(), received_sizes, sent_sizes, self.group)
        expert = torch.arange(by_rank.shape[1]).repeat(ranks).repeat_interleave(received)
        return all_to_all_single_autograd(held(arrived, expert).contiguous(), sent_sizes, received_sizes, self.group)


def build_with_experts(top_k: int = 1, name: str = "experts", kind: ExpertsKind = Experts) -> nn.Module:
    """A transformer of two blocks with four experts each."""
    feed_forward = partial(MixtureOfExperts, experts=4, top_k=top_k, experts_name=name, kind=kind)
    return TinyTransformer(layers=2, feed_forward=feed_forward)


Sizes = tuple[tuple[str, int], ...]
"""Name and ranks of each dimension of the expert mesh, outermost first: "ep", "dp_shard" and maybe "dp_outer"."""

FLAT: Sizes = (("ep", 2), ("dp_shard", 2))


def expert_mesh(sizes: Sizes) -> DeviceMesh:
    names, shape = zip(*sizes, strict=True)
    return mesh_of(shape, names)


def place(sizes: Sizes, model: nn.Module) -> None:
    """Leave a rank its experts of every block; it sends tokens to those of others."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.divide(expert_mesh(sizes)["ep"].get_group())


def whole(sizes: Sizes, experts_name: str, values: Values) -> Values:
    """Put the experts of all expert-parallel ranks together along dimension 0."""
    group = expert_mesh(sizes)["ep"].get_group()
    return {
        name: _gather(value.contiguous(), 0, group) if experts_name in name and value is not None else value
        for name, value in values.items()
    }


def arguments(sizes: Sizes) -> dict[str, Any]:
    """Experts on the expert mesh, all else on all ranks: one axis, or 2 x 2 where the experts have an outer one."""
    mesh = expert_mesh(sizes)
    if "dp_outer" not in dict(sizes):
        dense = mesh_of((dist.get_world_size(),), ("dp_shard",))
        return {"device_mesh": dense, "dp_shard_dim": "dp_shard", "expt_device_mesh": mesh}
    group = flattened(mesh, ("dp_outer", "dp_shard"), "expert_dp").get_group()
    return {**hybrid_arguments(2, 2), "expt_device_mesh": mesh, "hybrid_fsdp_expt_group": group}


def experts_of(sizes: Sizes, experts_name: str = ".experts.") -> Arrangement:
    together = partial(whole, sizes, experts_name)
    return Arrangement(f"experts {sizes}", partial(arguments, sizes), partial(place, sizes), whole=together)
