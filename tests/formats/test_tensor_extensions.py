"""Parameters of tensor classes that gather in their own way: the bits of one process, bytes, torchao, bad input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp import fsdp2, fully_shard, fully_shard_model
from tests.conftest import RunRanks
from tests.support.arrangements import divide_tensors, hybrid_arguments, tensor_parallel
from tests.support.on_ranks import on_ranks, refusal
from tests.support.optimizer_reference import hybrid
from tests.support.tensor_extension import Coded

SAMPLES, STEPS = 12, 4


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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7, bias=False), nn.Tanh(), nn.Linear(7, 2))
    for layer in model:
        if kind is not None and isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 2, generator=generator)


def in_one_process(kind: type[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train with rounded weights; return losses and final weights."""
    model = build(None)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        x, y = batch(step)
        for layer in model:
            x = F.linear(x, rounded(layer.weight, kind), layer.bias) if isinstance(layer, nn.Linear) else layer(x)
        losses.append((x - y).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses], [param.detach() for param in model.parameters()]


def own_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train on this rank's part of each batch; return its losses."""
    own, losses = SAMPLES // dist.get_world_size(), []
    for step in range(STEPS):
        part = slice(dist.get_rank() * own, (dist.get_rank() + 1) * own)
        x, y = (each[part] for each in batch(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def trained(ranks: tuple[int, ...], kind: type[Int8Gather]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train sharded; return the mean losses and the final weights, whole."""
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = hybrid_arguments(*ranks) if ranks[1:] else {}
    model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[nn.Linear], **places)
    losses = torch.stack(own_losses(model, optimizer))
    dist.all_reduce(losses)
    return list(losses / dist.get_world_size()), [param.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("kind", [Int8Gather, BlockGather])
@on_ranks(3)
def test_pytorchs_door_gathers_extensions(kind: type[Int8Gather]) -> None:
    model = build(kind)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    losses = torch.stack(own_losses(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    dist.all_reduce(losses)
    wanted, weights = in_one_process(kind)
    torch.testing.assert_close(list(losses / 3), wanted)
    torch.testing.assert_close([param.full_tensor() for param in model.parameters()], weights)


@pytest.mark.parametrize(("kind", "ranks"), [(Int8Gather, (3,)), (BlockGather, (2, 2))])
def test_training_equals_one_process_that_rounds(
    run_ranks: RunRanks, ranks: tuple[int, ...], kind: type[Int8Gather]
) -> None:
    losses, weights = in_one_process(kind)
    for seen in run_ranks(torch.tensor(ranks).prod().item(), trained, ranks, kind):
        torch.testing.assert_close(seen[0], losses)
        torch.testing.assert_close(seen[1], weights)


@on_ranks(2)
def test_codes_travel_and_stay_gathered() -> None:
    model = build()
    model, _ = fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1), fsdp_unit_modules=[nn.Linear])
    before = model.traffic()
    model(batch(0)[0])
    sent = model.traffic().since(before)
    plans = [group.plan for group in model.parameter_groups() if group.plan.stays_encoded]
    assert [plan.sent_bytes for plan in plans] == [plan.layout.numel for plan in plans]
    assert sent.gather_bytes == sum(group.plan.sent_bytes // 2 for group in model.parameter_groups())
    assert all(plan.gathered_bytes == plan.layout.numel for plan in plans)
    assert "gather Int8Gather" in str(model.describe())
    saved = model.state_dict()["module.0.weight"]
    assert saved.dtype is torch.float32
    assert torch.equal(saved.full_tensor(), build(None)[0].weight)


@on_ranks(2)
def test_several_tensors_travel_row_by_row_in_the_bytes_that_they_have() -> None:
    model = build(BlockGather)
    model, _ = fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1), fsdp_unit_modules=[nn.Linear])
    before = model.traffic()
    model(batch(0)[0])
    sent = model.traffic().since(before).gather_bytes
    plans = [group.plan for group in model.parameter_groups()]
    of_extensions = [plan.gathered_bytes for plan in plans if plan.stays_encoded]
    assert of_extensions == [
        plan.layout.numel * (columns + -(-columns // 4)) // columns
        for plan, columns in zip([plan for plan in plans if plan.stays_encoded], (6, 10, 7), strict=True)
    ]
    assert sent == sum(plan.sent_bytes // 2 for plan in plans)


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


def torchao_trained() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Train torchao's float8 layers; return this rank's losses and the final weights, whole."""
    from torchao.float8.float8_linear import Float8Linear

    model = torchao_model(gathers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Float8Linear])
    return own_losses(model, optimizer), [param.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("ranks", [3])
def test_float8_weights_of_torchao_train_as_in_one_process(run_ranks: RunRanks, ranks: int) -> None:
    """One process computes on the parts of the ranks one by one: inputs have a scale for each part."""
    pytest.importorskip("torchao")
    model = torchao_model(gathers=False)
    optimizer, wanted = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        x, y = batch(step)
        parts = zip(x.chunk(ranks), y.chunk(ranks), strict=True)
        losses = [(model(x_part) - y_part).square().mean() for x_part, y_part in parts]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append([loss.detach() for loss in losses])
    for rank, (losses, weights) in enumerate(run_ranks(ranks, torchao_trained)):
        torch.testing.assert_close(losses, [of_step[rank] for of_step in wanted])
        torch.testing.assert_close(weights, [param.detach() for param in model.parameters()])
