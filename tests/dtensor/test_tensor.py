"""Tensors that are cut unevenly, on real ranks: operations and reductions as on the whole tensor."""

import copy
import io
import math
from collections.abc import Callable
from itertools import cycle, product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._library.simple_registry import find_torch_dispatch_rule
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fsdp import fully_shard_model
from megatron_fsdp.dtensor import tensor as tensor_module
from megatron_fsdp.dtensor.reduction import ReducedScalar
from megatron_fsdp.dtensor.tensor import UnevenDTensor, as_sharded, register_with_torch
from megatron_fsdp.errors import ShardOperationError
from tests.support.on_ranks import on_ranks
from tests.support.uneven import CASES, UnevenCase, make_mesh


def check(name: str, got: Tensor, want: Tensor, tolerance: float = 0.0) -> None:
    """Assert the same type, shape, dtype and values."""
    same = type(got) is Tensor and (got.shape, got.dtype) == (want.shape, want.dtype)
    same = same and torch.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert same, f"{name}: got {type(got).__name__} {got}, expected {want}"


def gather(case: UnevenCase) -> None:
    mesh = make_mesh(case.sizes)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor, whole = case.tensor(mesh, dtype=dtype), case.whole().to(dtype)
        check(f"full {dtype}", tensor.full_tensor(), whole)
    tensor, whole = case.tensor(mesh), case.whole()
    everywhere = [Replicate()] * mesh.ndim
    replicated = tensor.redistribute(placements=everywhere)
    assert type(replicated) is DTensor or tensor.placements == tuple(everywhere)
    check("replicated", replicated.full_tensor(), whole)
    last = [Replicate()] * (mesh.ndim - 1) + [Shard(case.whole().ndim - 1)]
    if tuple(last) != tensor.placements:
        check("even cut", tensor.redistribute(placements=last).full_tensor(), whole)
    assert tensor.redistribute(placements=tensor.placements) is tensor
    assert repr(tensor).startswith("UnevenDTensor(")


def operate(case: UnevenCase) -> None:
    mesh = make_mesh(case.sizes)
    a, b, x, y = case.tensor(mesh, 1), case.tensor(mesh, 2), case.whole(1), case.whole(2)
    scalar = torch.tensor(0.5)
    operations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "mul": lambda s, t: s * t + 2 * s - t / 3,
        "where": lambda s, t: torch.where(s > t, s, t.abs()),
        "lerp": lambda s, t: torch.lerp(s, t, 0.25),
        "scalar": lambda s, t: s * scalar + t,
        "cast": lambda s, t: (s.to(torch.bfloat16) * t).double(),
        "in place": lambda s, t: s.clone().mul_(2).addcmul_(s, t, value=0.5).add_(t).clamp_(min=-1),
        "like": lambda s, t: torch.zeros_like(s) + torch.full_like(t, 3.0) + torch.ones_like(s) * s.new_ones(s.shape),
        "list": lambda s, t: torch._foreach_addcdiv([s, t], [t, s], [s + 3, t * t + 1], 0.1)[1],
        "view": lambda s, t: s.view(s.shape) + t.expand(t.shape).contiguous(),
        "isnan": lambda s, t: (s / t.sign().clamp(min=0)).isnan(),
        "masked": lambda s, t: s.masked_fill(t > 0, -1.0),
    }
    for name, operation in operations.items():
        result = operation(a, b)
        assert isinstance(result, UnevenDTensor), name
        check(name, result.full_tensor(), operation(x, y), 1e-6)


def reduce(case: UnevenCase) -> None:
    mesh = make_mesh(case.sizes)
    tensor, whole = case.tensor(mesh), case.whole()
    reductions: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda t: t.sum(),
        "sum of dims": lambda t: t.sum(dim=tuple(range(t.ndim))),
        "sum of counts": lambda t: (t > 0).sum(),
        "mean": lambda t: t.mean(),
        "any": lambda t: (t > 1).any(),
        "all": lambda t: (t > -1).all(),
        "count": torch.count_nonzero,
        "norm 0": lambda t: torch.linalg.vector_norm(t, 0),
        "norm 1": lambda t: t.norm(1),
        "norm 2": lambda t: t.norm(),
        "norm 3": lambda t: torch.linalg.vector_norm(t, 3.0),
        "bf16 sum": lambda t: (t * 0 + 1).bfloat16().sum(),
    }
    if whole.numel():
        reductions |= {
            "max": lambda t: t.max(),
            "min": lambda t: t.amin(),
            "int max": lambda t: (t * 10).long().max(),
            "norm inf": lambda t: torch.linalg.vector_norm(t, math.inf),
            "norm -inf": lambda t: torch.linalg.vector_norm(t, -math.inf),
            "nan max": lambda t: torch.where(t == t.max(), math.nan, t).max(),
            "nan": lambda t: torch.linalg.vector_norm(torch.where(t == t.max(), math.nan, t), math.inf),
        }
    for name, reduction in reductions.items():
        check(name, reduction(tensor).full_tensor(), reduction(whole), 1e-5)  # type: ignore[attr-defined]
    assert tensor.sum().item() == pytest.approx(whole.sum().item(), abs=1e-5)
    assert torch.equal(tensor, tensor.clone())
    assert not whole.numel() or not torch.equal(tensor, tensor + 1)


PENALTIES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of squares": lambda p: (p**2).sum(),
    "half": lambda p: (0.5 * (2 * p * p)).sum(),
    "sum": lambda p: p.sum() * 3,
    "mean": lambda p: (p.exp() * 2).mean(),
    "norm": lambda p: p.norm(),
    "vector norm": lambda p: torch.linalg.vector_norm(p, 3),
    "absolute": lambda p: p.abs().mean(),
    "gathered": lambda p: ((p.full_tensor() if isinstance(p, DTensor) else p) ** 3).sum(),
}


def differentiate(case: UnevenCase) -> None:
    mesh = make_mesh(case.sizes)
    if not case.whole().numel():
        return
    for name, penalty in PENALTIES.items():
        reference = nn.Parameter(case.whole())
        param = nn.Parameter(case.tensor(mesh))
        spec = param.shard_spec  # type: ignore[attr-defined]
        param.register_hook(lambda grad, spec=spec: as_sharded(grad, spec))
        for _ in range(2):  # the second adds to the first
            x = torch.ones((), requires_grad=True)
            loss = x * 2 + 0.3 * penalty(param)
            other = 2 + 0.3 * penalty(reference)
            loss.backward()
            other.backward()
            check(f"{name} loss", loss.detach(), other.detach(), 1e-5)
            assert x.grad is not None
            assert type(x.grad) is Tensor
        assert isinstance(param.grad, UnevenDTensor)
        assert reference.grad is not None
        check(f"{name} gradient", param.grad.full_tensor(), reference.grad, 1e-5)
    param = nn.Parameter(case.tensor(mesh))
    (param.to_local() ** 2).sum().backward()  # type: ignore[attr-defined]
    assert param.grad is not None
    check("to_local gradient", param.grad.full_tensor(), 2 * case.whole())  # type: ignore[attr-defined]


def copy_and_draw(case: UnevenCase) -> None:
    register_with_torch()
    mesh = make_mesh(case.sizes)
    whole = case.whole()
    param = nn.Parameter(case.tensor(mesh))
    assert (type(param), isinstance(param, nn.Parameter)) == (UnevenDTensor, True)
    again = copy.deepcopy(param)
    assert isinstance(again, nn.Parameter)
    assert again.to_local().data_ptr() != param.to_local().data_ptr() or not param.to_local().numel()
    check("deepcopy", again.detach().full_tensor(), whole)  # type: ignore[attr-defined]
    file = io.BytesIO()
    torch.save({"w": param.detach(), "p": param}, file)
    for weights_only in (True, False):
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        assert isinstance(loaded["p"], nn.Parameter)
        assert torch.equal(loaded["w"].to_local(), param.to_local())
        assert loaded["w"].shard_spec.description == param.shard_spec.description  # type: ignore[attr-defined]
    torch.manual_seed(3)
    nn.init.normal_(param, std=2.0)
    drawn = torch.randn_like(param.detach())
    torch.manual_seed(3)
    wanted = nn.init.normal_(torch.empty(whole.shape), std=2.0)
    check("normal_", param.detach().full_tensor(), wanted)  # type: ignore[attr-defined]
    check("randn_like", drawn.full_tensor(), torch.randn_like(wanted))  # type: ignore[attr-defined]
    before = param._version + param.to_local()._version
    with torch.no_grad():
        param.mul_(2)
    assert param._version + param.to_local()._version > before


def refuse(case: UnevenCase) -> None:
    mesh = make_mesh(case.sizes)
    tensor, whole = case.tensor(mesh), case.whole()
    if tensor.shard_spec.is_whole or not whole.numel():
        return
    even = DTensor.from_local(tensor.to_local(), mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())
    attempts: dict[str, Callable[[], object]] = {
        "matmul": lambda: tensor @ tensor,
        "index": lambda: tensor[0],
        "sum of a dim": lambda: tensor.sum(dim=0, keepdim=True) if tensor.ndim > 1 else tensor @ tensor,
        "transpose": lambda: tensor.transpose(0, -1) + 1,
        "flatten": lambda: tensor.view(-1, 1),
        "plain": lambda: tensor + whole,
        "plain from left": lambda: whole * tensor,
        "copy of plain": lambda: tensor.copy_(whole),
        "copy to plain": lambda: whole.clone().copy_(tensor),
        "even": lambda: tensor + even,
        "even in place": lambda: even.add_(tensor),
        "softmax": lambda: tensor.softmax(-1),
        "sort": lambda: tensor.sort(),
        "cumsum": lambda: tensor.cumsum(0),
        "std": lambda: tensor.std(),
        "prod": lambda: tensor.prod(),
        "dropout": lambda: nn.functional.dropout(tensor),
        "gradient cut": lambda: tensor.to_local(grad_placements=[Shard(1)] * mesh.ndim),
        "list": lambda: torch._foreach_add([tensor], [even]),
    }
    for attempt in attempts.values():
        with pytest.raises(ShardOperationError):
            attempt()
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim)
    check("with replicated", (tensor + replicated).full_tensor(), whole + whole)
    check("with a row", (tensor * replicated[:1]).full_tensor(), whole * whole[:1])


CHECKS = {each.__name__: each for each in (gather, operate, reduce, differentiate, copy_and_draw, refuse)}


@pytest.mark.parametrize(("check_name", "num_ranks"), list(zip(CHECKS, cycle([2, 3, 4]), strict=False)))
@on_ranks()
def test_uneven_tensors_are_as_the_whole_tensor(num_ranks: int, check_name: str) -> None:
    cases = [case for case in CASES if case.num_ranks == num_ranks]
    assert cases
    for case in cases:
        CHECKS[check_name](case)


@on_ranks(2)
def test_a_tensor_that_every_rank_has_whole_takes_any_operation() -> None:
    case = next(case for case in CASES if case.name == "whole everywhere")
    mesh = make_mesh(case.sizes)
    tensor, whole = case.tensor(mesh), case.whole()
    check("matmul", (tensor @ tensor.t()).full_tensor(), whole @ whole.t())  # type: ignore[attr-defined]
    check("rows", tensor.sum(dim=0).full_tensor(), whole.sum(dim=0))  # type: ignore[attr-defined]
    check("index", tensor[1:].full_tensor(), whole[1:])  # type: ignore[attr-defined]
    row = tensor[0]
    check("row", (tensor * row).full_tensor(), whole * whole[0])  # type: ignore[attr-defined]
    check("into plain", torch.zeros(4, 3).copy_(tensor), whole)


@on_ranks(2)
def test_equal_and_allclose_compare_tensors_that_are_cut_differently_or_plain() -> None:
    first, second = (case for case in CASES if case.shape == (5, 3) and case.sizes == (2,))
    mesh = make_mesh(first.sizes)
    tensor, other, whole = first.tensor(mesh), second.tensor(mesh), first.whole()
    near = whole.clone()
    near[4, 2] += 1e-7
    for left, right in ((tensor, other), (other, tensor), (tensor, whole), (whole, tensor)):
        assert torch.equal(left, right)
        assert torch.allclose(left, right)
    assert not torch.equal(tensor, near)
    assert torch.allclose(near, other)
    assert not torch.allclose(tensor, near + 1)
    assert not torch.equal(tensor, whole[:2])


@on_ranks(2)
def test_numbers_of_sharded_tensors_are_read_as_those_of_plain_ones() -> None:
    """As lists that make a tensor, which torch reads where no operation of a subclass arrives, and as text."""
    case = next(case for case in CASES if case.name == "inside rows")
    tensor, whole, one = case.tensor(make_mesh(case.sizes)), case.whole(), torch.tensor(2.5)
    scale = next(fully_shard_model(nn.ParameterList([one])).parameters()).detach()
    readings: list[Callable[[Tensor, Tensor], Any]] = [
        lambda t, s: torch.tensor([t.norm(), 1.0, t.max(), s]),
        lambda t, _: torch.tensor([(t > 0).sum(), (t > 9).sum()]),
        lambda t, _: torch.tensor([(t > 0).any(), (t > 9).any()]),
        lambda t, _: torch.as_tensor([t.norm()], dtype=torch.float64),
        lambda t, _: torch.from_numpy(numpy.array([t.norm(), t.sum()])),
        lambda t, _: torch.tensor(torch.linalg.vector_norm(t, keepdim=True).tolist()),
        lambda t, _: torch.arange(99)[(t > 0).sum()],
    ]
    for reading in readings:
        torch.testing.assert_close(reading(tensor, scale), reading(whole, one))
    assert f"{tensor.norm():.3f} {scale:.1f}" == f"{whole.norm():.3f} {one:.1f}"


@on_ranks(2)
def test_reading_the_memory_of_a_sharded_tensor_is_refused_in_words() -> None:
    case = next(case for case in CASES if case.name == "inside rows")
    tensor = case.tensor(make_mesh(case.sizes))
    attempts: list[Callable[[], object]] = [
        tensor.tolist,
        tensor.numpy,
        lambda: numpy.asarray(tensor),
        lambda: torch.from_dlpack(tensor),
        tensor.untyped_storage,
        tensor.share_memory_,
        lambda: torch.compile(lambda given: given + 1, backend="eager")(tensor),
    ]
    for attempt in attempts:
        with pytest.raises(Exception, match=r"no storage of all its elements|use an optimizer of torch.optim"):
            attempt()


@on_ranks(2)
def test_initialisations_that_address_elements_are_those_of_one_process() -> None:
    register_with_torch()
    matrix, kernel = (UnevenCase("inside rows", shape, (2,), (0,), (0.4,)) for shape in ((5, 3), (3, 2, 5)))
    initialise: list[tuple[UnevenCase, Callable[[Tensor], Tensor]]] = [
        (matrix, nn.init.eye_),
        (matrix, nn.init.orthogonal_),
        (matrix, lambda given: nn.init.sparse_(given, 0.4)),
        (kernel, nn.init.dirac_),
    ]
    for case, each in initialise:
        tensor, whole = case.tensor(make_mesh(case.sizes)), case.whole()
        for given in (tensor, whole):
            torch.manual_seed(3)
            each(given)
        assert torch.equal(tensor.full_tensor(), whole)


def test_a_torch_that_passes_subclasses_over_gets_a_rule_for_every_operation() -> None:
    """What torch 2.11 needs, here on any torch; `_RULES` holds what the import of the module has registered."""
    libraries = tensor_module._RULES or tensor_module._register_rules()
    rule = UnevenDTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
    for name in ("add.Tensor", "detach", "_foreach_norm.Scalar", "_fused_adamw_", "random_.from"):
        assert find_torch_dispatch_rule(SimpleNamespace(__qualname__=f"aten::{name}"), UnevenDTensor) is rule, name
    assert {"aten", "prims", "_c10d_functional"} <= set(libraries)
    assert find_torch_dispatch_rule(torch.ops.aten.detach.default, DTensor) is None


# ---- torch's own gradient clipping over parameters on different meshes -----------------------------------------------


FOUR = [case for case in CASES if case.num_ranks == 4 and 0 not in case.shape]
ONE_AXIS = [
    UnevenCase("all inside rows", (5, 3), (4,), (0,), (0.1, 0.1, 0.6)),
    UnevenCase("all whole", (3,), (4,)),
    UnevenCase("all empty but one", (2, 2), (4,), (0,), (0.0, 0.0, 0.0)),
]


@pytest.mark.full(cover=1)
@pytest.mark.parametrize(
    ("order", "foreach", "dtype"),
    [*product([0.0, 1.0, 2.0, 3.5, math.inf], [None, False], [torch.float32]), (2.0, None, torch.bfloat16)],
)
@on_ranks(4)
def test_clipping_over_several_meshes_equals_one_process(
    order: float, foreach: bool | None, dtype: torch.dtype
) -> None:
    """Norms of low precision are summed in float32."""
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
    assert norm.item() == pytest.approx(wanted.item(), rel=1e-5 if dtype == torch.float32 else 1e-2)
    assert type(norm * 1) is torch.Tensor
    # (4,): 1; (2, 2) sharded along one dim: 1 for each of two dims; along both, in one order or the other: 2 each
    assert foreach is False or reduces.call_count <= 7
    for got, want in zip(sharded[1:], whole[1:], strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=0, atol=1e-6)  # type: ignore[union-attr]


@on_ranks(4)
def test_the_norms_of_many_tensors_share_one_collective() -> None:
    register_with_torch()
    mesh, case = make_mesh((4,)), ONE_AXIS[0]
    wholes = [case.whole(seed) for seed in range(50)]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces:
        norms = torch._foreach_norm([case.tensor(mesh, seed) for seed in range(50)])
    assert all(type(norm) is ReducedScalar for norm in norms)
    total = torch.linalg.vector_norm(torch.stack(norms))
    assert reduces.call_count == 1
    assert repr(norms[3]).startswith("ReducedScalar(")
    assert total.item() == pytest.approx(torch.stack(wholes).norm().item(), rel=1e-5)
    assert (norms[3] * 2).item() == pytest.approx(2 * wholes[3].norm().item(), rel=1e-5)


@pytest.mark.parametrize("tensor_dim", [1, None])
@pytest.mark.parametrize("infinite", [False, True])
@on_ranks(4)
def test_all_ranks_learn_of_an_infinite_gradient(infinite: bool, tensor_dim: int | None) -> None:
    """On the last one, along tensor-parallel ranks or those with copies."""
    case = UnevenCase("columns", (5, 3), (2, 2), (0,), (0.5,), tensor_dim, tensor_dim)
    grad = case.tensor(make_mesh(case.sizes))
    if infinite and dist.get_rank() == 3:
        grad.to_local().view(-1)[0] = math.inf
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.tensor([0.5]))
    assert found.item() == float(infinite)
