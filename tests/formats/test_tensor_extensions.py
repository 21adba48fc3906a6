"""Parameters of tensor classes that gather in their own way: the bits of one process, bytes, torchao, bad input."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp import fsdp2, fully_shard_model
from tests.conftest import RunRanks
from tests.support.arrangements import divide_tensors, tensor_parallel
from tests.support.arrangements import hybrid as hybrid_ranks
from tests.support.case import (
    FP32,
    InPlace,
    Run,
    Scenario,
    Setting,
    assert_parity,
    reference,
    run_sharded,
    three_steps,
)
from tests.support.doors import one_by_one
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.optimizer_reference import hybrid
from tests.support.tensor_extension import Coded
from tests.support.zoo import ModelCase, make_vector_batch, vector_loss

LIKE_TORCH = partial(one_by_one, fsdp2.fully_shard)


class Int8Gather(torch.Tensor):
    """An extension: plain values that travel as int8, with one scale that ranks agree on by themselves."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls: type["Int8Gather"], values: torch.Tensor) -> "Int8Gather":
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=values.dtype, device=values.device, requires_grad=values.requires_grad
        )
        made.values = values
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, _context: None, _size: Any, _stride: Any) -> "Int8Gather":
        return cls(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = func(*[each.values if isinstance(each, cls) else each for each in args], **(kwargs or {}))
        return cls(plain) if func is torch.ops.aten.detach.default else plain

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert self.values.dim() == 2, "a shard is whole rows"
        largest = self.values.abs().amax()
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
        scale = largest / 127
        return ((self.values / scale.clamp_min(1e-30)).round().to(torch.int8),), (scale,)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert dtype is torch.float32
        (codes,), (scale,) = gathered, metadata
        if out is None:
            return Coded(codes, scale), (codes,)
        assert out.codes.data_ptr() == codes.data_ptr()
        out.scale = scale
        return None


class BlockScaled(Coded):
    """What modules compute with: e4m3 codes and e8m0 scales of four in a row, float32 to look at."""

    def decoded(self) -> torch.Tensor:
        return decoded(self.codes, self.scale)


def encoded(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes (n, columns) and the exponents of a scale for each four of a row, uint8, 127 more."""
    blocks = F.pad(values, (0, -values.shape[1] % 4)).unflatten(1, (-1, 4))
    _, exponents = torch.frexp(blocks.abs().amax(dim=2) / 448)
    codes = torch.ldexp(blocks, -exponents[..., None]).flatten(1)[:, : values.shape[1]].to(torch.float8_e4m3fn)
    return codes, (exponents + 127).to(torch.uint8)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 (n, columns)."""
    exponents = (scales.int() - 127).repeat_interleave(4, dim=1)[:, : codes.shape[1]]
    return torch.ldexp(codes.float(), exponents)


class BlockGather(Int8Gather):
    """An extension of two tensors, codes and scales of blocks, as Transformer Engine's MXFP8 weights."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: DeviceMesh, orig_size: torch.Size, stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert (mesh.ndim, orig_size[1:], mp_policy.param_dtype) == (1, self.values.shape[1:], torch.float32)
        assert isinstance(module, nn.Linear)
        assert stride == (orig_size[1], 1)
        return encoded(self.values), ("a block", 4)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert (metadata, dtype) == (("a block", 4), torch.float32)
        codes, scales = gathered
        if out is None:
            return BlockScaled(codes, scales), gathered
        assert (out.codes.data_ptr(), out.scale.data_ptr()) == (codes.data_ptr(), scales.data_ptr())
        return None


class Pair(Int8Gather):
    """A class that wants two tensors gathered, one of them not by rows."""

    def fsdp_pre_all_gather(self, _mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.values.to(torch.int8), torch.zeros(len(self.values) // 2, 6, dtype=torch.uint8)), ()


class Halves(Int8Gather):
    """A class that is more than plain values."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "values"], None


class Dequantised(Int8Gather):
    """A class that makes a plain tensor of what was gathered."""

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        made = gathered[0].to(dtype) * metadata[0]
        return (made, gathered) if out is None else out.copy_(made)


class Quantised(Coded):
    """Codes and scales that do not say how they are gathered, as frozen weights of torchao."""

    @staticmethod
    def __new__(cls: type["Quantised"], values: torch.Tensor, scale: torch.Tensor | None = None) -> "Quantised":
        codes = (values * 9).to(torch.int8) if scale is None else values
        return Coded.__new__(cls, codes, torch.tensor(1 / 9) if scale is None else scale)


class HalfAnExtension(torch.Tensor):
    """A class without the second method."""

    def fsdp_pre_all_gather(self) -> None: ...


def rounded(weight: torch.Tensor, kind: type[torch.Tensor] = Int8Gather) -> torch.Tensor:
    """Return what one process computes with in place of an extension; gradients pass."""
    if kind is BlockGather:
        return weight + (decoded(*encoded(weight.detach())) - weight.detach())
    scale = weight.detach().abs().amax() / 127
    codes = (weight.detach() / scale.clamp_min(1e-30)).round().to(torch.int8)
    return weight + (codes.float() * scale - weight.detach())


def build(kind: Callable[[torch.Tensor], torch.Tensor] | None = Int8Gather) -> nn.Module:
    """Build three layers; the rows of the last do not divide, and on three ranks one holds none of them."""
    with fixed_seed(0):
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7, bias=False), nn.Tanh(), nn.Linear(7, 2))
    for layer in model:
        if kind is not None and isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


class Rounded(nn.Linear):
    """A linear of one process, which computes with a rounded weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, rounded(self.weight, self.kind), self.bias)


def build_rounded(kind: type[torch.Tensor]) -> nn.Module:
    model = build(None)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.__class__, layer.kind = Rounded, kind  # type: ignore[assignment]
    return model


def scenario(build: Callable[[], nn.Module], script: Callable[[Run], None] = three_steps) -> Scenario:
    return Scenario(script, ModelCase(build, partial(make_vector_batch, features=(6, 2)), vector_loss, (nn.Linear,)))


def sharded(kind: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    return Run(scenario(partial(build, kind)), Setting(3))


@pytest.mark.parametrize(
    ("kind", "num_ranks", "setting"),
    [
        (Int8Gather, 3, Setting(3)),
        (BlockGather, 4, Setting(3, arrangement=hybrid_ranks(2, 2))),
        (Int8Gather, 3, InPlace(LIKE_TORCH)),
        (BlockGather, 3, InPlace(LIKE_TORCH)),
    ],
)
def test_training_equals_one_process_that_rounds(
    run_ranks: RunRanks, kind: type[Int8Gather], num_ranks: int, setting: Any
) -> None:
    found = run_ranks(num_ranks, run_sharded, [(scenario(partial(build, kind)), setting)])
    assert_parity([each for (each,) in found], reference(scenario(partial(build_rounded, kind))), FP32)


@pytest.mark.parametrize(("kind", "num_scales"), [(Int8Gather, (0, 0, 0)), (BlockGather, (2, 3, 2))])
@on_ranks(2)
def test_tensors_travel_row_by_row_in_the_bytes_that_they_have_and_stay_gathered(
    kind: type[Int8Gather], num_scales: tuple[int, ...]
) -> None:
    run = sharded(kind)
    model = run.sharded
    assert model is not None
    before = model.traffic()
    run.loss(0)
    sent = model.traffic().since(before).gather_bytes
    plans = [group.plan for group in model.parameter_groups() if group.plan.stays_encoded]
    of_rows = [(columns + scales, columns) for columns, scales in zip((6, 10, 7), num_scales, strict=True)]
    assert [plan.gathered_bytes for plan in plans] == [
        plan.layout.numel * num_bytes // columns for plan, (num_bytes, columns) in zip(plans, of_rows, strict=True)
    ]
    assert sent == sum(group.plan.sent_bytes // 2 for group in model.parameter_groups())
    if kind is Int8Gather:
        assert [plan.sent_bytes for plan in plans] == [plan.layout.numel for plan in plans]
        assert "gather Int8Gather" in str(model.describe())
        saved = model.state_dict()["module.0.weight"]
        assert saved.dtype is torch.float32
        assert torch.equal(saved.full_tensor(), build(None)[0].weight)


@on_ranks(4)
def test_tensor_extensions_beside_other_parallelism_are_refused_by_name() -> None:
    for arguments, words in (
        (hybrid(3, "optim"), "main weights that outer ranks share"),
        (tensor_parallel(divide_tensors).arguments(), "beside tensor or expert"),
    ):
        text = refusal(fully_shard_model, build(BlockGather), fsdp_unit_modules=[nn.Linear], **arguments)
        assert text.startswith("0.weight is a BlockGather, which is gathered in its own way; this cannot be done")
        assert words in text


@pytest.mark.parametrize(
    ("kind", "options", "is_odd", "words"),
    [
        (HalfAnExtension, {}, True, "is a HalfAnExtension with fsdp_pre_all_gather and without fsdp_post_all_gather"),
        (Halves, {}, False, "does not flatten into one plain tensor of its shape but into values, values"),
        (
            Pair,
            {},
            False,
            "fsdp_pre_all_gather of Pair wants 2 tensors gathered, (1, 6) torch.int8, (0, 6) torch.uint8, for rows",
        ),
        (Dequantised, {}, False, "fsdp_post_all_gather of Dequantised returns a Tensor, with memory of its own"),
        (Quantised, {"zero_dp_strategy": 0}, False, "is a Quantised, a quantised weight, and is trained; freeze it"),
        (Int8Gather, {"zero_dp_strategy": 2}, False, "strategy optim_grads, which gathers none"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_gathered_is_refused_on_all_ranks(
    kind: type[torch.Tensor], options: dict[str, Any], is_odd: bool, words: str
) -> None:
    """With `is_odd` only the second rank has the class."""
    make = kind if issubclass(kind, Int8Gather | Quantised) else lambda values: values.as_subclass(kind)
    model = build(None if is_odd and dist.get_rank() == 0 else make)
    assert words in refusal(fully_shard_model, model, **options)


def torchao_model(gathers: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathers)
    return convert_to_float8_training(build(None), config=config)


def parts_in_turn(run: Run) -> None:
    """Inputs have a scale for each part."""
    for step in range(3):
        parts = [run.whole_batch(step).part(rank, run.num_ranks) for rank in run.ranks_here]
        loss = torch.stack([run.case.loss(run.model, part) for part in parts]).mean()
        run.note_loss(loss)
        loss.backward()
        run.step()


def test_float8_weights_of_torchao_train_as_in_one_process(run_ranks: RunRanks) -> None:
    pytest.importorskip("torchao")
    scenarios = [scenario(partial(torchao_model, gathers), parts_in_turn) for gathers in (True, False)]
    found = run_ranks(3, run_sharded, [(scenarios[0], Setting(3))])
    assert_parity([each for (each,) in found], reference(scenarios[1], 3), FP32)
