"""FSDP 2 x TP 2 on a transformer that torch's `parallelize_module` has divided equals one process."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.arrangements import (
    Arrangement,
    Divide,
    divide_tensors,
    divide_tensors_and_sequences,
    mesh_of,
    tensor_arguments,
    tensor_mesh,
    tensor_parallel,
)
from tests.support.case import (
    Run,
    Scenario,
    Setting,
    accumulate,
    adamw_above_noise,
    check_strategies,
    clip_by_model,
    clip_by_torch,
    two_steps,
)
from tests.support.on_ranks import assert_equal_tensors, engine_of, fixed_seed, on_ranks, refusal
from tests.support.zoo import DENSE, Block, ModelCase, build_dense, make_vector_batch, vector_loss

PLANS: tuple[Divide, ...] = (divide_tensors, divide_tensors_and_sequences)


# ---- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("inner", range(4))
def test_every_strategy_equals_one_process(run_ranks: RunRanks, inner: int) -> None:
    setting = Setting(inner, one_call=inner % 2 == 0, arrangement=tensor_parallel(PLANS[inner // 2]))
    scenario = Scenario(accumulate, DENSE) if inner % 2 else Scenario(two_steps, DENSE, adamw_above_noise)
    check_strategies(run_ranks, 4, scenario, [setting])


@pytest.mark.full(short=["2-pairs0"])
@pytest.mark.parametrize(("outer", "pairs"), [(2, ((3, 1),)), (1, ((0, 0), (3, 1)))])
def test_hybrid_sharding_of_tensor_parallel_parts_equals_one_process(
    run_ranks: RunRanks, outer: int, pairs: tuple[tuple[int, int], ...]
) -> None:
    """2 outer x 1 inner x 2 tensor-parallel ranks, and 1 x 2 x 2."""
    settings = [
        Setting(inner, outer_strategy=outside, arrangement=tensor_parallel(PLANS[turn % 2], outer))
        for turn, (inner, outside) in enumerate(pairs)
    ]
    check_strategies(run_ranks, 4, Scenario(accumulate, DENSE, adamw_above_noise), settings)


# ---- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.full(short=["clip_by_model"])
@pytest.mark.parametrize("script", [clip_by_model, clip_by_torch])
def test_the_norm_counts_every_element_once(run_ranks: RunRanks, script: Callable[[Run], None]) -> None:
    """Parts are summed over tensor-parallel ranks; what they all hold is not."""
    settings = [Setting(inner, arrangement=tensor_parallel(divide)) for inner, divide in ((0, PLANS[0]), (3, PLANS[1]))]
    check_strategies(run_ranks, 4, Scenario(script, DENSE), settings)


class ScaleOfParts(nn.Module):
    """A parameter between a column-wise and a row-wise layer; `sums` says what each rank's gradient is."""

    def __init__(self, mesh: DeviceMesh, *, sums: bool) -> None:
        super().__init__()
        self.gradient = Partial() if sums else Replicate()
        self.scale = nn.Parameter(distribute_tensor(torch.ones(1), mesh, [Replicate()]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.scale, DTensor)
        return inputs * self.scale.to_local(grad_placements=[self.gradient])


def scaled(mesh: DeviceMesh, *, sums: bool) -> nn.Module:
    with fixed_seed(0):
        model = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Linear(8, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model[1] = ScaleOfParts(mesh, sums=sums)
    return model


@on_ranks(4)
def test_the_first_backward_finds_a_gradient_of_which_ranks_have_a_part() -> None:
    """Under no_sync and in microbatches, too; nothing is compared later, and nobody waits where nothing is whole."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    for sums in (True, False):
        model = fully_shard_model(scaled(mesh["tp"], sums=sums), device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp")
        with model.no_sync():
            loss = model(torch.ones(3, 4)).square().sum()
            if sums:
                loss.backward()
                assert not engine_of(model).gradient_checks
                continue
            text = refusal(loss.backward, error=ConfigurationError)
        assert text.startswith("1 parameters are whole on every tensor-parallel rank, but their gradients differ")
        assert "1.scale (norms from" in text
    model = nn.Sequential(nn.Linear(4, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    whole = fully_shard_model(model, device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp")
    whole(torch.ones(3, 4)).sum().backward()


# ---- divided by torch ------------------------------------------------------------------------------------------------

ARRANGEMENTS = {
    "tensors": tensor_parallel(divide_tensors),
    "tensors and sequences": tensor_parallel(divide_tensors_and_sequences),
    "hybrid": tensor_parallel(divide_tensors, 2),
}


@pytest.mark.full(short=["3-hybrid", "0-tensors and sequences"])
@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(4)
def test_whole_weights_are_those_of_one_process_bit_for_bit(name: str, strategy: int) -> None:
    """By the model's own function, and by each parameter's `full_tensor`."""
    arrangement = ARRANGEMENTS[name]
    with fixed_seed(0):
        model = build_dense()
    expected = {found: param.detach().clone() for found, param in model.named_parameters()}
    arrangement.place(model)
    sharded = fully_shard_model(
        model,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        outer_dp_sharding_strategy=int(name == "hybrid" and strategy == 3),
        **arrangement.arguments(),
    )
    assert_equal_tensors(sharded.full_parameters(), expected)
    by_parameter = {name: param.full_tensor().detach() for name, param in sharded.module.named_parameters()}
    assert_equal_tensors(by_parameter, expected)


@on_ranks(4)
def test_duplicates_that_differ_between_tensor_parallel_ranks_are_kept_and_reported() -> None:
    with fixed_seed(0):
        model = build_dense()
    divide_tensors_and_sequences(model, tensor_mesh()["tp"])
    before = {}
    with torch.no_grad():
        for name, param in model.named_parameters():
            if not isinstance(param, DTensor) or param.placements == (Replicate(),):
                local = param.to_local() if isinstance(param, DTensor) else param
                local += tensor_mesh()["tp"].get_local_rank()
                before[name] = local.clone()
    assert len(before) > 8
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=3, **tensor_arguments())
    after = sharded.full_parameters()
    assert_equal_tensors({name: after[name] for name in before}, before)
    messages = [text for text in (str(found.message) for found in caught) if "tensor-parallel" in text]
    assert len(messages) == (tensor_mesh()["tp"].get_local_rank() == 0)  # the first one says it for all
    assert all(any(f"(first: {name})" in message for name in before) for message in messages)


@on_ranks(4)
def test_dtensors_over_a_dimension_that_nobody_named_are_refused() -> None:
    with fixed_seed(0):
        model = build_dense()
    divide_tensors(model, tensor_mesh()["tp"])
    mesh = mesh_of((dist.get_world_size(),), ("dp_shard",))
    assert re.search("DTensor.*tp_dim", refusal(fully_shard_model, model, mesh, "dp_shard", error=ConfigurationError))


# ---- divided by hand, as Megatron's layers are -----------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Identity; the gradients of all tensor-parallel ranks are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum over all tensor-parallel ranks; the gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None


class HandMade(nn.Module):
    """A norm, a linear layer cut by columns and one cut by rows; plain tensors with Megatron's attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 7)
        self.group: dist.ProcessGroup | None = None

    def divide(self, group: dist.ProcessGroup) -> None:
        self.group = group
        for layer, name, dim in ((self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1)):
            whole = layer.get_parameter(name).detach()
            part = nn.Parameter(whole.chunk(2, dim)[dist.get_rank(group)].clone())
            part.tensor_model_parallel, part.partition_dim = True, dim  # type: ignore[attr-defined]
            setattr(layer, name, part)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.group is not None:
            y = _Copy.apply(y, self.group)
        y = torch.tanh(self.up(y)) @ self.down.weight.T
        if self.group is not None:
            y = _Sum.apply(y, self.group)
        return x + y + self.down.bias


def build_hand_made() -> nn.Module:
    return nn.Sequential(HandMade(), HandMade(), nn.Linear(7, 5))


def place_hand_made(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, HandMade):
            module.divide(tensor_mesh()["tp"].get_group())


HAND_MADE = ModelCase(build_hand_made, make_vector_batch, vector_loss, (HandMade,))


def test_layers_divided_by_hand_equal_one_process(run_ranks: RunRanks) -> None:
    """Weights, gradients and norm: every part is the rank's own, and what all hold is counted once."""
    plain = tensor_parallel(divide_tensors)
    found = Arrangement("divided by hand", plain.arguments, place_hand_made, plain.part)
    settings = [Setting(inner, arrangement=found) for inner in (1, 3)]
    check_strategies(run_ranks, 4, Scenario(clip_by_model, HAND_MADE), settings)
