"""All of torch's operations, by their schemas: the elementwise ones run on shards, and give the same elements."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload

from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import ShardOperationError
from tests.support.on_ranks import of_ranks, on_ranks
from tests.support.uneven import CASES, make_mesh

RAN = "ran"
NUMBERS: dict[str, object] = {"Scalar": 1, "number": 1, "float": 0.5, "int": 1, "bool": False}

# What is refused though it looks elementwise for the arguments that are tried.
REFUSED = {
    "views, splits and orders, which happen to keep a shape": "chunk unsafe_chunk hsplit tensor_split slice slice_copy "
    "slice_inverse slice_scatter squeeze squeeze_ squeeze_copy view view_copy flipud msort fft_fftshift fft_ifftshift",
    "other memory": "resize_as resize_as_ set set_",
    "elements that are searched or counted": "isin masked_scatter masked_scatter_ masked_select_backward",
    "quantised tensors": "dequantize fake_quantize_per_tensor_affine fake_quantize_per_tensor_affine_cachemask",
    "a buffer that torch makes plain": "log_sigmoid",
    "the backward of what reduces or draws": "mse_loss_backward rrelu_with_noise_backward",
    "arguments that end the process": "smooth_l1_loss_backward chalf",
}


def operations() -> Iterator[OpOverload]:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = name.partition("::")
        base, _, form = rest.partition(".")
        is_private = base.startswith("_") and not base.startswith("__")
        if namespace == "aten" and not is_private and torch._C._dispatch_has_kernel(name):
            found = getattr(getattr(torch.ops.aten, base, None), form or "default", None)
            if found is not None and torch.Tag.nondeterministic_seeded not in found.tags:
                yield found


def arguments(func: OpOverload, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """Values for all arguments that an operation needs; None where it takes others than tensors and numbers."""
    found: dict[str, Any] = {}
    for index, argument in enumerate(func._schema.arguments):
        kind = str(argument.type)
        if kind == "Tensor" and argument.is_out:
            found[argument.name] = None
        elif kind == "Tensor":
            values = torch.rand(shape, generator=torch.Generator().manual_seed(index)) * 0.8 + 0.1
            found[argument.name] = values.to(dtype) if dtype.is_floating_point else (values * 9).to(dtype)
        elif not argument.has_default_value() and kind not in NUMBERS:
            return None
        elif not argument.has_default_value():
            found[argument.name] = NUMBERS[kind]
    return found if any(isinstance(value, Tensor) for value in found.values()) else None


def results(func: OpOverload, given: dict[str, Any], like: list[Any] | None = None) -> list[Any]:
    """Call an operation on copies; returns what it gives, and has written to."""
    outs = iter(like or [torch.empty(0) for value in given.values() if value is None])
    copies = {
        name: next(outs) if value is None else value.clone() if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    made = func(**copies)
    return list(made) if isinstance(made, tuple | list) else [made]


def is_elementwise(func: OpOverload, given: dict[str, Any], spec: ShardSpec, whole: list[Any]) -> bool:
    """Whether elements of results come from the same elements of the arguments, as far as a cut shows."""
    for take in (spec.take, lambda tensor: tensor.flatten()[3:8], lambda tensor: tensor.flatten().flip(0)):
        cut = {name: take(value) if isinstance(value, Tensor) else value for name, value in given.items()}
        try:
            made = results(func, cut)
            kept = all(each.shape == spec.shape and each.layout is torch.strided for each in whole)
            if not kept or not all(same(take(full), each) for full, each in zip(whole, made, strict=True)):
                return False
        except Exception:  # noqa: BLE001 - not of these arguments
            return False
    return True


def same(left: Tensor, right: Tensor) -> bool:
    return (left.shape, left.dtype) == (right.shape, right.dtype) and torch.allclose(
        left, right, rtol=1e-5, atol=1e-6, equal_nan=True
    )


def outcome(func: OpOverload, dtype: torch.dtype, spec: ShardSpec) -> str:
    """Name what is wrong with an operation on shards, or `RAN`; empty: it is none that has to run."""
    given = arguments(func, dtype, tuple(spec.shape))
    try:
        whole = results(func, given) if given is not None else []
    except Exception:  # noqa: BLE001 - not of these arguments
        return ""
    if given is None or "empty" in str(func) or not is_elementwise(func, given, spec, whole):
        return ""
    sharded = {
        name: UnevenDTensor.wrap(spec.take(value).clone(), spec) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    outs: list[Any] = [UnevenDTensor.wrap(torch.empty_like(spec.take(each)), spec) for each in whole]
    try:
        made = results(func, sharded, outs)
    except ShardOperationError:
        return f"{func} is refused"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is wrong
        return f"{func}: {type(error).__name__} {error}"
    for each, full in zip(made, whole, strict=True):
        if not isinstance(each, UnevenDTensor) or not same(each._local_tensor, spec.take(full)):
            return f"{func} gives another result"
    return RAN


@pytest.mark.full
@on_ranks(2)
def test_every_elementwise_operation_of_torch_runs_on_shards() -> None:
    case = next(case for case in CASES if case.name == "inside rows")
    spec = case.spec(make_mesh(case.sizes))
    named = " ".join(REFUSED.values()).split()
    tried = [func for func in operations() if func._schema.name.removeprefix("aten::") not in named]
    own = tried[dist.get_rank() :: 2]  # they are local, so that each rank tries half of them
    dtypes = (torch.float32, torch.int64, torch.bool)
    outcomes = [(f"{func} ({dtype})", outcome(func, dtype, spec)) for func in own for dtype in dtypes]
    assert not [each for each in outcomes if each[1] not in ("", RAN)]
    assert sum(of_ranks(sum(text == RAN for _, text in outcomes))) > 800


@on_ranks(2)
def test_in_place_forms_run_as_what_they_are_the_form_of() -> None:
    case = next(case for case in CASES if case.name == "inside rows")
    tensor, whole = case.tensor(make_mesh(case.sizes)), case.whole()
    other = whole.flip(0)
    forms: dict[str, tuple[Any, ...]] = {"abs_": (), "relu_": (), "hardswish_": (), "threshold_": (0.1, 0.5)}
    forms |= dict.fromkeys(("copysign_", "heaviside_", "ge_", "hypot_", "arctan2_"), (other,))
    for name, rest in forms.items():
        written, spec = getattr(torch.ops.aten, name), tensor.shard_spec
        cut = [UnevenDTensor.wrap(spec.take(each), spec) if each is other else each for each in rest]
        expected = written(whole.clone(), *rest)
        assert torch.equal(written(tensor.clone(), *cut).full_tensor(), expected), name
