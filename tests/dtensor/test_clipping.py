"""torch's own gradient clipping over parameters on different meshes: one process' norm, one collective per mesh."""

import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.dtensor.reduction import ReducedScalar
from megatron_fsdp.dtensor.tensor import register_with_torch
from tests.conftest import RunRanks
from tests.support.uneven import CASES, UnevenCase, make_mesh

FOUR = [case for case in CASES if case.num_ranks == 4 and 0 not in case.shape]
ONE_AXIS = [
    UnevenCase("all inside rows", (5, 3), (4,), (0,), (0.1, 0.1, 0.6)),
    UnevenCase("all whole", (3,), (4,)),
    UnevenCase("all empty but one", (2, 2), (4,), (0,), (0.0, 0.0, 0.0)),
]
ORDERS = [0.0, 1.0, 2.0, 3.5, math.inf]


def clip(order: float, foreach: bool | None, dtype: torch.dtype) -> dict[str, Any]:
    register_with_torch()
    sharded: list[nn.Parameter] = [nn.Parameter(torch.zeros(3, dtype=dtype))]  # one that no mesh knows of
    whole: list[nn.Parameter] = [nn.Parameter(torch.zeros(3, dtype=dtype))]
    meshes = {sizes: make_mesh(sizes) for sizes in ((4,), (2, 2))}
    for index, case in enumerate([*FOUR, *ONE_AXIS]):
        param = nn.Parameter(case.tensor(meshes[case.sizes], dtype=dtype))
        param.grad = case.tensor(meshes[case.sizes], index, dtype)
        reference = nn.Parameter(case.whole().to(dtype))
        reference.grad = case.whole(index).to(dtype)
        sharded.append(param)
        whole.append(reference)
    for first in (sharded[0], whole[0]):
        first.grad = torch.tensor([1.0, 2.0, -3.0], dtype=dtype)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces:
        norm = nn.utils.clip_grad_norm_(sharded, 0.5, order, foreach=foreach)
    wanted = nn.utils.clip_grad_norm_(whole, 0.5, order, foreach=foreach)
    groups = Counter(call.kwargs["group"].group_name for call in reduces.call_args_list)
    grads = [(got.grad, want.grad) for got, want in zip(sharded[1:], whole[1:], strict=True)]
    differences = [(got.full_tensor() - want).abs().max().item() for got, want in grads]  # type: ignore[union-attr]
    return {
        "norm": norm.item(),
        "wanted": wanted.item(),
        "plain": type(norm * 1) is torch.Tensor,
        "largest difference": max(differences),
        "collectives": sum(groups.values()),
    }


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_over_several_meshes_equals_one_process(
    run_ranks: RunRanks, order: float, foreach: bool | None
) -> None:
    for found in run_ranks(4, clip, order, foreach, torch.float32):
        assert found["norm"] == pytest.approx(found["wanted"], rel=1e-5)
        assert found["largest difference"] <= 1e-6
        assert found["plain"]
        # (4,): 1; (2, 2) sharded along one dim: 1 for each of two dims; along both, in one order or the other: 2 each
        assert foreach is False or found["collectives"] <= 7


def test_norms_of_low_precision_gradients_are_summed_in_float32(run_ranks: RunRanks) -> None:
    for found in run_ranks(4, clip, 2.0, None, torch.bfloat16):
        assert found["norm"] == pytest.approx(found["wanted"], rel=1e-2)


def many_norms() -> tuple[int, str, float, float]:
    register_with_torch()
    mesh = make_mesh((4,))
    case = ONE_AXIS[0]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces:
        norms = torch._foreach_norm([case.tensor(mesh, seed) for seed in range(50)])
    assert all(type(norm) is ReducedScalar for norm in norms)
    total = torch.linalg.vector_norm(torch.stack(norms))
    return reduces.call_count, repr(norms[3]), total.item(), (norms[3] * 2).item()


def test_the_norms_of_many_tensors_share_one_collective(run_ranks: RunRanks) -> None:
    wholes = [ONE_AXIS[0].whole(seed) for seed in range(50)]
    for count, shown, total, again in run_ranks(4, many_norms):
        assert count == 1
        assert shown.startswith("ReducedScalar(")
        assert total == pytest.approx(torch.stack(wholes).norm().item(), rel=1e-5)
        assert again == pytest.approx(2 * wholes[3].norm().item(), rel=1e-5)


def unscale(infinite: bool, tensor_dim: int | None) -> tuple[float, float]:
    """What every rank learns of an infinity on the last one, along tensor-parallel ranks or those with copies."""
    case = UnevenCase("columns", (5, 3), (2, 2), (0,), (0.5,), tensor_dim, tensor_dim)
    mesh = make_mesh(case.sizes)
    grad = case.tensor(mesh)
    if infinite and dist.get_rank() == 3:
        grad.to_local().view(-1)[0] = math.inf
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor([0.5]))
    return found.item(), (grad.to_local().view(-1)[-1] * 2).item()


@pytest.mark.parametrize("tensor_dim", [1, None])
@pytest.mark.parametrize("infinite", [False, True])
def test_all_ranks_learn_of_an_infinite_gradient(run_ranks: RunRanks, infinite: bool, tensor_dim: int | None) -> None:
    assert [found for found, _ in run_ranks(4, unscale, infinite, tensor_dim)] == [float(infinite)] * 4
