"""Expert parallelism: each rank holds some of the experts of every layer, and tokens are sent to them.

transformers 5 keeps the experts of a layer as one module called `experts`. Its weights are stacked over the experts,
and it is called as `experts(hidden_states, top_k_index, top_k_weights)`: for each token the sum over its chosen experts
of weight times what the expert makes of the token. With T tokens, k experts each, P ranks with E experts each:

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

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp.automodel.architecture import text_config
from megatron_fsdp.automodel.tensor_parallel.styles import not_a_view, summed, with_summed_gradient
from megatron_fsdp.engine.plans import SAME_ON_EXPERT_RANKS
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError

_CONFIG_FIELDS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_WANTED = (
    "expert parallelism needs transformers' interface of fused experts: forward(hidden_states, top_k_index, "
    "top_k_weights), num_experts, and every weight a parameter of the module itself with num_experts rows, one of them "
    "of three dimensions; use ep_size=1 for this model"
)


def parallelize_experts(
    model: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh | None = None, *, as_dtensors: bool = True
) -> list[str]:
    """Leave each rank an equal share of every layer's experts, and send tokens to them.

    Everything else, such as routers, stays whole on every rank, for its own tokens. Auxiliary losses of routers
    (`output_router_logits=True`) are computed from a rank's own tokens, as under data parallelism.

    Args:
        model: Whole; changed in place.
        ep_mesh: The "ep" dimension alone.
        tp_mesh: Ranks that have the same tokens; each sends its share of them. None: ranks have tokens of their own.
        as_dtensors: Weights of experts become DTensors, `Shard(0)` on `ep_mesh`, under their former names; False: plain
            parameters, as this package's engine takes them with the mesh of experts.

    Returns:
        The names of the experts modules.

    Raises:
        ParallelSizeError: The ranks do not divide the experts.
        ConfigurationError: There are none, or they cannot be divided.
    """
    experts = find_experts(model, ep_mesh.size())
    for name, part in experts.items():
        num_local = len(next(part.parameters())) // ep_mesh.size()
        for attribute, param in list(part.named_parameters()):
            part.register_parameter(attribute, _share_of(param, ep_mesh, num_local, as_dtensors))
        former: Any = type(part)
        part.__class__ = _divided_class(DividedExperts, former)
        assert isinstance(part, DividedExperts)
        part.expert_mesh, part.tensor_mesh, part.num_local, part.adapters = ep_mesh, tp_mesh, num_local, {}
        _divide_adapters(model.get_submodule(_outermost(name)))
    return list(experts)


_BASE = ".base_layer"


def _outermost(name: str) -> str:
    """Return the name of the outermost adapter of peft around an experts module; its own where there is none."""
    return name.partition(_BASE)[0]


def _divide_adapters(part: nn.Module) -> None:
    """Have the adapters around an experts module add to this rank's experts; every rank keeps them whole.

    Their gradients are the sum over all ranks' experts, so they are reduced as dense parameters are.
    """
    while not isinstance(part, DividedExperts):
        for name, child in part.named_children():
            for param in child.parameters() if name != _BASE[1:] else ():
                setattr(param, SAME_ON_EXPERT_RANKS, True)
        former: Any = type(part)
        part.__class__ = _divided_class(_DividedAdapter, former)
        part = part.get_submodule(_BASE[1:])


def engine_mesh(moe_mesh: DeviceMesh, dim: str) -> DeviceMesh:
    """Return the mesh (ep_shard, ep) of experts as this package's engine takes it, sharded over `dim`; collective."""
    made: DeviceMesh = moe_mesh._unflatten(0, (moe_mesh["ep_shard"].size(), 1), (dim, "tp"))
    return made


def find_routers(model: nn.Module, expert_names: Sequence[str]) -> list[nn.Module]:
    """Return the modules called gate or router that stand beside experts."""
    parents = [model.get_submodule(_outermost(name).rpartition(".")[0]) for name in expert_names]
    return [part for parent in parents for name, part in parent.named_children() if name in ("gate", "router")]


@functools.cache
def _divided_class(mixin: type[nn.Module], former: type[nn.Module]) -> Any:
    return type(f"Divided{former.__name__}", (mixin, former), {})


def _share_of(param: nn.Parameter, mesh: DeviceMesh, num_local: int, as_dtensor: bool) -> nn.Parameter:
    """Copy this rank's rows into their own memory, so that the others' can be freed."""
    local = (
        param.detach()
        .narrow(0, mesh.get_local_rank() * num_local, num_local)
        .clone(memory_format=torch.contiguous_format)
    )
    if as_dtensor:
        contiguous = torch.empty(param.shape, device="meta").stride()
        local = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=contiguous)
    divided = nn.Parameter(local, requires_grad=param.requires_grad)
    divided.__dict__.update(param.__dict__)  # marks of transformers, such as that a weight is initialised
    return divided


def find_experts(model: nn.Module, ranks: int) -> dict[str, nn.Module]:
    """Find all experts modules by name, and raise for those that so many ranks cannot divide."""
    found = {name: part for name, part in model.named_modules() if name.rpartition(".")[2] == "experts"}
    found = dict(_without_adapters(*each) for each in found.items())
    if not found:
        raise ConfigurationError(
            f"{type(model).__name__} has no module called experts, so there is nothing for ep_size > 1 to divide; give "
            "a mixture-of-experts model with fused experts (transformers 5), or ep_size=1"
        )
    for name, part in found.items():
        problem = _problem(part)
        if problem is not None:
            raise ConfigurationError(f"{name} ({type(part).__name__}) {problem}; {_WANTED}")
        num_experts = len(next(part.parameters()))
        if num_experts % ranks:
            raise ParallelSizeError(
                f"{name} has {num_experts} experts ({_config_field(model, num_experts)}), which ep_size={ranks} does "
                "not divide; give an ep_size that divides the number of experts"
            )
    return found


def _without_adapters(name: str, part: nn.Module) -> tuple[str, nn.Module]:
    """Return the name and the experts module inside of adapters of peft (`target_parameters`)."""
    while hasattr(part, "parameter_name") and hasattr(part, _BASE[1:]):
        name, part = name + _BASE, part.get_submodule(_BASE[1:])
    return name, part


def _problem(part: nn.Module) -> str | None:
    """Return the reason why a module cannot be divided, as a predicate; None if it can."""
    own = dict(part.named_parameters(recurse=False))
    inner = [name for name, _ in part.named_parameters() if name not in own]
    num_experts = getattr(part, "num_experts", None)
    if inner:
        return f"has weights in modules of its own ({inner[0]})"
    if not own:
        return "has no weights"
    if any(True for _ in part.buffers()):
        return f"has a buffer ({next(name for name, _ in part.named_buffers())})"
    if not isinstance(num_experts, int):
        return "does not say num_experts"
    for name, param in own.items():
        if isinstance(param, DTensor):
            return f"has {name} divided over ranks already ({param.placements})"
        if param.ndim == 0 or param.shape[0] != num_experts:
            return f"has {name} of shape {tuple(param.shape)}, which is not a row for each of its {num_experts} experts"
    if all(param.ndim < 3 for param in own.values()):
        return "has no weight of three dimensions"
    return None if _takes_routing(part) else f"is called as forward{inspect.signature(part.forward)}"


def _takes_routing(part: nn.Module) -> bool:
    """Return True if forward takes tokens, indices and weights, in this order; the names differ between families."""
    names = [
        name
        for name, parameter in inspect.signature(part.forward).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(names) != 3 or names[0] != "hidden_states":
        return False
    return names[1] in ("top_k_index", "router_indices") and names[2] in ("top_k_weights", "routing_weights")


def _config_field(model: nn.Module, num_experts: int) -> str:
    stored = getattr(text_config(model), "__dict__", {})  # configs offer the number under names of other families too
    fields = [field for field in _CONFIG_FIELDS if stored.get(field) == num_experts]
    return f"config.{fields[0]}={num_experts}" if fields else f"num_experts={num_experts}"


class DividedExperts(nn.Module):
    """Mixin for an experts module that holds one rank's experts.

    As torch's `fully_shard` does, the module keeps its identity and gets a class of its own, made of this one and its
    former one; so names of parameters, and `isinstance`, stay as they were.
    """

    expert_mesh: DeviceMesh  # one-dimensional, of the expert-parallel ranks
    tensor_mesh: DeviceMesh | None  # one-dimensional, of ranks that have the same tokens
    num_local: int  # experts of each rank; rank r of the mesh has those from r * num_local on
    adapters: dict[str, list[tuple[Tensor, Tensor, float]]]  # while one runs, for these experts: A, B, f of w + f * A B

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the result of the undivided module; collective over the expert-parallel ranks.

        T tokens (T, hidden) of this rank, k experts of each, numbered over all ranks (T, k), and their factors (T, k).
        """
        if (mesh := self.tensor_mesh) is None:
            return self._dispatch(hidden_states, top_k_index, top_k_weights)
        tokens = torch.arange(len(hidden_states), device=hidden_states.device)
        mine = torch.tensor_split(tokens, mesh.size())[mesh.get_local_rank()]
        hidden_states = with_summed_gradient(hidden_states, mesh)
        share = hidden_states[mine], top_k_index[mine], with_summed_gradient(top_k_weights, mesh)[mine]
        parts = torch.zeros_like(hidden_states).index_copy(0, mine, self._dispatch(*share))
        return not_a_view(summed(parts, mesh))

    def _dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_chosen = top_k_index.shape[-1]
        order = torch.argsort(top_k_index.flatten(), stable=True)
        plan = _plan_exchange(top_k_index, self.expert_mesh, self.num_local)
        rows = hidden_states.repeat_interleave(num_chosen, dim=0)[order]
        computed = self._compute(plan.forth(rows), plan.local_index)
        returned = plan.back(computed)[torch.argsort(order)]
        weighted = returned.view(*top_k_index.shape, hidden_states.shape[-1]) * top_k_weights.unsqueeze(-1)
        return weighted.sum(dim=-2).to(hidden_states.dtype)

    def _compute(self, rows: Tensor, local_index: Tensor) -> Tensor:
        """Compute each row by the expert of its index; (rows, hidden) in the same order and dtype."""
        proxy = object.__new__(type(self))  # all of this module but with this rank's weights: not one attribute of
        proxy.__dict__.update(self.__dict__)  # it changes, so recomputation may run while something else reads it
        weights = {
            name: param.to_local() if isinstance(param, DTensor) else param
            for name, param in self._parameters.items()
            if param is not None
        }
        for name, factors in self.adapters.items():
            for one, other, factor in factors:
                dtype = weights[name].dtype
                weights[name] = torch.baddbmm(weights[name], one.to(dtype), other.to(dtype), alpha=factor)
        proxy.__dict__.update(weights, num_experts=self.num_local)
        if rows.shape[0] == 0:  # FSDP2 reduces existing gradients, which must be the same ones on all ranks: zeros here
            return rows + torch.stack([weight.flatten()[:0].sum() for weight in weights.values()]).sum().to(rows.dtype)
        ones = rows.new_ones(rows.shape[0], 1)
        computed: Tensor = super(DividedExperts, proxy).forward(rows, local_index.unsqueeze(-1), ones)
        return computed.to(rows.dtype)


class _DividedAdapter(nn.Module):
    """Mixin for an adapter of peft on a weight of divided experts: it gives its product to them.

    As peft has it, the weight itself would be replaced while the experts run, and be as long as all of them.
    """

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        adapter: Any = self
        experts: DividedExperts = adapter.get_base_layer()
        first = experts.expert_mesh.get_local_rank() * experts.num_local
        mine = slice(first, first + experts.num_local)
        found = [adapter.get_delta_factors(name) for name in active_adapters if name in adapter.lora_A]
        experts.adapters[adapter.parameter_name] = [(one[mine], other[mine], factor) for one, other, factor in found]
        try:
            yield
        finally:
            del experts.adapters[adapter.parameter_name]


@dataclass(frozen=True)
class _Exchange:
    """The numbers of rows sent between the expert-parallel ranks."""

    group: dist.ProcessGroup
    sent: list[int]  # rows of this rank for each rank
    received: list[int]  # rows of each rank for this one
    local_index: Tensor  # (rows received,), expert of each, numbered on this rank

    def forth(self, rows: Tensor) -> Tensor:
        """Send rows to the ranks of their experts."""
        return wait_tensor(all_to_all_single_autograd(rows, self.received, self.sent, self.group))

    def back(self, rows: Tensor) -> Tensor:
        """Send rows back to their ranks."""
        return wait_tensor(all_to_all_single_autograd(rows, self.sent, self.received, self.group))


@torch.no_grad()
def _plan_exchange(top_k_index: Tensor, mesh: DeviceMesh, num_local: int) -> _Exchange:
    """Count rows and exchange the counts; one all-to-all, and one wait of the host for the device."""
    group, num_ranks = mesh.get_group(), mesh.size()
    counts = torch.zeros(num_ranks * num_local, dtype=torch.int64, device=top_k_index.device)
    chosen = top_k_index.flatten().long()
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    per_rank = torch.stack([counts, arriving]).view(2, num_ranks, num_local)
    sent, received = per_rank.sum(dim=-1).tolist()
    experts = torch.arange(num_local, device=counts.device).repeat(num_ranks)
    return _Exchange(group, sent, received, experts.repeat_interleave(arriving, output_size=sum(received)))


def shard_experts(
    model: nn.Module,
    expert_names: Sequence[str],
    ep_shard_mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    reshard_after_forward: bool | int | None,
    gradient_divisor: int,
) -> None:
    """Apply FSDP2 to each experts module; call it before layers and model are sharded, which then leave experts out.

    The gradient of an expert on a rank is a sum over the tokens of all expert-parallel ranks, so its factor is not one
    over the ranks that it is reduced over, but one over the ranks with tokens of their own:

        gradient = sum over ep_shard ranks / gradient_divisor

    With `gradient_divisor = dp * cp` it is, as that of all other weights, the mean over data-parallel ranks of the
    gradients of their losses; of tokens that tensor-parallel ranks have in common each rank sends its share.

    With one rank in `ep_shard_mesh` nothing is sharded, but precision and the factor are applied. Inputs and outputs of
    experts are not cast: inside of a layer they have the layer's dtypes, and the router's weights may be more precise.
    """
    policy = replace(mp_policy, cast_forward_inputs=False, output_dtype=None)
    num_shards = ep_shard_mesh.size()
    for name in expert_names:
        sharded = fully_shard(
            model.get_submodule(name),
            mesh=ep_shard_mesh,
            mp_policy=policy,
            offload_policy=offload_policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=partial(placement_of, num_shards=num_shards),
        )
        # FSDP2 averages over ep_shard; the rest of the factor comes after. Its own gradient_divide_factor is of no use:
        # gloo lacks the operation for it, and sums instead of it divide twice where ep_shard is one rank (torch 2.13).
        if gradient_divisor != num_shards:
            scale: Any = partial(torch.Tensor.div_, other=gradient_divisor / num_shards)
            sharded.set_all_reduce_hook(scale)


def placement_of(param: Tensor, *, num_shards: int) -> Shard:
    """Return FSDP2's placement of a rank's share of a weight: whole experts if they divide, else another dimension."""
    shape = (param.to_local() if isinstance(param, DTensor) else param).shape
    return Shard(next((dim for dim, length in enumerate(shape) if length % num_shards == 0), 0))
