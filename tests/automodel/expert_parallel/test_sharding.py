"""How FSDP2 cuts divided experts, and the dtypes that they compute with."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from tests.conftest import RunRanks

pytest.importorskip("transformers")

from megatron_fsdp.automodel.expert_parallel import parallelize_experts, placement_of, shard_experts
from tests.automodel.expert_parallel.training import expert_mesh
from tests.automodel.small_models import batch_of, build
from tests.support.arrangements import mesh_of


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [((4, 6, 6), 2, 0), ((3, 6, 6), 2, 1), ((3, 5, 6), 2, 2), ((3, 5, 5), 2, 0), ((3, 5, 5), 1, 0), ((2, 8), 4, 1)],
)
def test_whole_experts_are_shared_out_if_they_divide_else_slices(
    shape: tuple[int, ...], num_shards: int, dim: int
) -> None:
    assert placement_of(torch.empty(shape), num_shards=num_shards) == Shard(dim)


def dtypes_under_a_policy() -> dict[str, set[torch.dtype]]:
    """Of what goes into and out of experts, of their weights inside, and of what the optimizer sees."""
    mesh, seen = expert_mesh(2), {"in": set(), "routing": set(), "out": set(), "weights": set()}
    model = build("mixtral", num_hidden_layers=1)
    (name,) = parallelize_experts(model, mesh["ep"])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    options: dict[str, Any] = {"offload_policy": OffloadPolicy(), "reshard_after_forward": True}
    shard_experts(model, [name], mesh["ep_shard"], mp_policy=policy, gradient_divisor=2, **options)
    inner = replace(policy, output_dtype=None)
    fully_shard(model.model.layers[0], mesh=mesh_of((2,), ("dp_shard",)), mp_policy=inner)
    fully_shard(model, mesh=mesh_of((2,), ("dp_shard",)), mp_policy=policy)

    def look(part: nn.Module, args: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
        seen["in"].add(args[0].dtype)
        seen["routing"].add(args[2].dtype)
        seen["out"].add(out.dtype)
        seen["weights"] |= {param.dtype for param in part.parameters()}

    model.get_submodule(name).register_forward_hook(look, prepend=True)
    model(input_ids=batch_of(2)["input_ids"], use_cache=False).logits.sum().backward()
    gradients = {param.grad.dtype for param in model.get_submodule(name).parameters() if param.grad is not None}
    return {**seen, "gradients": gradients, "parameters": {p.dtype for p in model.get_submodule(name).parameters()}}


def test_experts_compute_in_the_policys_dtype_and_routing_weights_keep_theirs(run_ranks: RunRanks) -> None:
    low, full = {torch.bfloat16}, {torch.float32}
    wanted = {"in": low, "routing": full, "out": low, "weights": low, "gradients": full, "parameters": full}
    assert run_ranks(2, dtypes_under_a_policy) == [wanted, wanted]
