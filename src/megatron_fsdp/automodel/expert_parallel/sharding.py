"""Shard divided experts over the data-parallel ranks that hold the same ones, by FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp.automodel.expert_parallel.dispatch import DividedExperts
from megatron_fsdp.errors import ConfigurationError


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

    With `gradient_divisor = ep_shard * ep = dp * cp * tp` it is, as that of all other weights, the mean over
    data-parallel ranks of the gradients of their losses; tokens that tensor-parallel ranks have in common arrive from
    each of them, and so count once.

    Args:
        model: As `parallelize_experts` left it.
        expert_names: What `parallelize_experts` returned.
        ep_shard_mesh: One-dimensional, of the ranks that hold the same experts; "ep_shard" of the mesh that also has
            "ep". One rank is allowed: then nothing is sharded, but precision and the factor are applied.
        mp_policy: Of FSDP2. Inputs and outputs of experts are not cast: inside of a layer they have the layer's dtypes,
            and the router's weights may be more precise.
        offload_policy: Of FSDP2.
        reshard_after_forward: Of FSDP2.
        gradient_divisor: Ranks that send tokens to experts: all of the mesh (ep_shard, ep).

    Raises:
        ConfigurationError: A name is not one of divided experts, or the divisor is not positive.
    """
    if gradient_divisor < 1:
        raise ConfigurationError(f"gradient_divisor={gradient_divisor} is no number of ranks; give ep_shard * ep")
    policy = replace(mp_policy, cast_forward_inputs=False, output_dtype=None)
    num_shards = ep_shard_mesh.size()
    for name in expert_names:
        part = model.get_submodule(name)
        if not isinstance(part, DividedExperts):
            raise ConfigurationError(
                f"{name} ({type(part).__name__}) is not divided over ranks; give the names that parallelize_experts "
                "returned"
            )
        sharded = fully_shard(
            part,
            mesh=ep_shard_mesh,
            mp_policy=policy,
            offload_policy=offload_policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=partial(placement_of, num_shards=num_shards),
        )
        # FSDP2 averages over ep_shard; the rest of the factor comes after. Its own gradient_divide_factor is of no use:
        # gloo lacks the operation for it, and sums instead of it divide twice where ep_shard is one rank (torch 2.13).
        sharded.set_all_reduce_hook(partial(_divide, factor=gradient_divisor / num_shards))


def placement_of(param: Tensor, *, num_shards: int) -> Shard:
    """Where FSDP2 cuts a rank's share of a weight: whole experts where they divide, else the first dimension that does.

    Args:
        param: (experts, ...), a DTensor on the mesh of experts or a plain tensor.
        num_shards: Ranks that it is cut for.
    """
    shape = (param.to_local() if isinstance(param, DTensor) else param).shape
    return Shard(next((dim for dim, length in enumerate(shape) if length % num_shards == 0), 0))


def _divide(gradients: Tensor, factor: float) -> None:
    if factor != 1:
        gradients.div_(factor)
