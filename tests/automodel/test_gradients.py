"""Accumulation, losses per token and clipping over any sharding equal one process."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from megatron_fsdp import fully_shard_model
from megatron_fsdp.automodel import accumulation_context
from megatron_fsdp.automodel.gradients import clip_grad_norm_, count_label_tokens, scale_per_token_loss
from megatron_fsdp.errors import ConfigurationError, NonFiniteNormError
from tests.automodel.training import (
    STRATEGIES,
    gradients_of,
    managed,
    optimizer_of,
    parameters_of,
    reference,
    strategy,
    whole,
)
from tests.support.arrangements import flattened, mesh_of
from tests.support.counting import ALL_REDUCE, OpCounts
from tests.support.language_models import batch_of, build, label_count, token_loss_sum
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, on_ranks, refusal
from tests.support.zoo import UnusedBlock

MAX_NORM, SAMPLES = 0.05, 8


def make_model() -> nn.Sequential:
    with fixed_seed(0):
        return nn.Sequential(*(UnusedBlock() for _ in range(4)))


def make_inputs() -> Tensor:
    with fixed_seed(1):
        return torch.randn(SAMPLES, 7)


def all_ranks() -> DeviceMesh:
    return mesh_of((dist.get_world_size(),), ("dp",))


def two_by_two(first: str, second: str) -> DeviceMesh:
    return mesh_of((2, 2), (first, second))


def fsdp2() -> nn.Module:
    model, mesh = make_model(), all_ranks()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_by_engine(model: nn.Module, mesh: DeviceMesh, **arguments: Any) -> nn.Module:
    return fully_shard_model(model, mesh, "dp", fsdp_unit_modules=[UnusedBlock], **arguments)


def labels_of(rows: int) -> Tensor:
    """(rows, 6), of which rows ignore 1, 2, 3, ... labels at their end."""
    labels = torch.arange(rows * 6).view(rows, 6)
    for row in range(rows):
        labels[row, 5 - row % 4 :] = -100
    return labels


@on_ranks(4)
def test_labels_are_counted_over_ranks_and_microbatches() -> None:
    """Ranks have 5, 4, 3 and 2."""
    mesh, rank = two_by_two("dp", "cp"), dist.get_rank()
    mine, over = labels_of(4)[rank][None], flattened(mesh, ("dp", "cp"), "dp_cp")
    assert count_label_tokens(mine, shifted=True) == 5 - rank
    assert count_label_tokens(mine, over, shifted=True) == count_label_tokens(mine, mesh, shifted=True) == 14
    assert count_label_tokens(mine, over.get_group(), shifted=False) == 10
    assert count_label_tokens([mine, mine], mesh["cp"], shifted=True) == (18, 18, 10, 10)[rank]


def weighted_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """A sum over tokens of different weights."""
    return (model(rows).square().sum(-1) * rows[:, 0].abs()).sum()


@pytest.mark.parametrize("per_token", [False, True])
@on_ranks(2)
def test_every_token_weighs_the_same_on_ranks_with_different_numbers(per_token: bool) -> None:
    """Ranks have 2 and 6 tokens; gradients are those of the mean over 8."""
    mesh, inputs = all_ranks(), make_inputs()
    mine = inputs[:2] if dist.get_rank() == 0 else inputs[2:]
    reference = make_model()
    (weighted_loss(reference, inputs) / SAMPLES).backward()
    gradients = gradients_of(reference)
    norm = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
    rescale: dict[str, Any] = {"gradients_are_summed": True} if per_token else {"dp_group_size": 2}
    model = shard_by_engine(make_model(), mesh, calculate_per_token_loss=True) if per_token else fsdp2()
    scale_per_token_loss(weighted_loss(model, mine), SAMPLES, **rescale).backward()
    assert_equal_tensors(gradients_of(model), gradients, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(clip_grad_norm_([model], MAX_NORM), norm, rtol=1e-5, atol=0.0)
    assert_equal_tensors(gradients_of(model), gradients_of(reference), rtol=1e-4, atol=1e-7)


def test_factors_without_effect_or_meaning_are_refused() -> None:
    for count, sizes in ((0, {"dp_group_size": 2}), (3, {}), (3, {"dp_group_size": 2, "gradients_are_summed": True})):
        refusal(scale_per_token_loss, torch.ones(()), count, error=ConfigurationError, **sizes)


def accumulate(model: nn.Module, microbatches: int, rows: int, seed: int, **options: Any) -> tuple[float, list[int]]:
    """Backward of all microbatches; the loss of the whole batch, and how often each microbatch reduced gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = batch_of(rows, seed=seed)
    own = {name: value.chunk(ranks)[rank].chunk(microbatches) for name, value in batch.items()}
    total, reductions = torch.zeros(()), []
    for index in range(microbatches):
        with OpCounts() as counts, accumulation_context(model, index == microbatches - 1, **options):
            logits = model(input_ids=own["input_ids"][index], use_cache=False).logits
            loss = token_loss_sum(logits, own["labels"][index]) * ranks / label_count(batch["labels"])
            loss.backward()
        total += loss.detach()
        reductions.append(counts.collectives.reductions)
    dist.all_reduce(total)
    return total.item() / ranks, reductions


def accumulate_like_the_whole_batch(name: str, microbatches: int, **fields: Any) -> list[list[int]]:
    """Two steps of accumulation, each equal to one process; returns the reductions of each microbatch."""
    rows = 2 * microbatches
    expected = reference("llama", steps=2, rows=rows)
    model = managed(strategy(name, **fields), build("llama"))
    optimizer = optimizer_of(model)
    seen = []
    for step in range(2):
        optimizer.zero_grad()
        loss, reductions = accumulate(model, microbatches, rows, seed=1 + step)
        seen.append(reductions)
        assert abs(loss - expected.losses[step]) < 1e-5
        grads = gradients_of(model)
        assert_equal_tensors(grads, expected.gradients[step], 1e-4, 1e-5)
        optimizer.step()
        found = parameters_of(model)
        assert_equal_tensors(found, expected.parameters[step], 2e-4, 2e-4)
    return seen


@pytest.mark.full(short=["2-ddp", "3-megatron_fsdp"])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("microbatches", [2, 3])
@on_ranks(2)
def test_microbatches_give_the_gradients_of_the_whole_batch_with_one_reduction(name: str, microbatches: int) -> None:
    for reductions in accumulate_like_the_whole_batch(name, microbatches):
        assert reductions[:-1] == [0] * (microbatches - 1)
        assert reductions[-1] > 0


@pytest.mark.full(short=["fsdp2"])
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_without_deferral_every_microbatch_reduces_and_the_sum_is_the_same(name: str) -> None:
    model = managed(strategy(name), build("llama"))
    _, reductions = accumulate(model, 3, 6, 1, defer_grad_sync=False)
    assert_equal_tensors(gradients_of(model), reference("llama", rows=6, steps=1).gradients[0], 1e-4, 1e-5)
    assert reductions[0] >= reductions[1] > 0  # the engine's first backward also agrees on unused parameters
    assert reductions[1] == reductions[2]


@on_ranks(2)
def test_config_says_whether_fsdp2_defers_and_the_argument_overrules_it() -> None:
    units = 5  # four layers and the root
    found = []
    for defers in (True, False):
        model = managed(strategy("fsdp2", defer_fsdp_grad_sync=defers), build("llama"))
        found.append(accumulate(model, 2, 4, 1)[1])
        found.append(accumulate(model, 2, 4, 1, defer_grad_sync=not defers)[1])
    assert found == [[0, units], [units, units], [units, units], [0, units]]


@on_ranks(2)
def test_exception_inside_leaves_the_model_reducing_again() -> None:
    for name in STRATEGIES:
        model = managed(strategy(name), build("llama"))
        with pytest.raises(KeyError, match=r"inside"), accumulation_context(model, False):
            raise KeyError("inside")
        batch = batch_of(2)
        with OpCounts() as counts:
            model(input_ids=batch["input_ids"], use_cache=False).logits.sum().backward()
        assert counts.collectives.reductions > 0, name


def test_model_that_no_strategy_made_parallel_is_refused() -> None:
    told = refusal(accumulation_context(nn.Linear(2, 2), True).__enter__, error=ConfigurationError)
    assert told.startswith("the model is a Linear; give what a manager")


NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


# ---- meshes ----------------------------------------------------------------------------------------------------------


def spread(shape: tuple[int, ...], mesh: DeviceMesh | None, placements: list[Placement], seed: int) -> nn.Parameter:
    """A parameter with a gradient, both cut; the same whole tensors on every rank."""
    with fixed_seed(seed):
        values = [torch.randn(shape), torch.randn(shape)]
    if mesh is not None:
        values = [distribute_tensor(value, mesh, placements, src_data_rank=None) for value in values]
    param = nn.Parameter(values[0])
    param.grad = values[1]
    return param


def params_on_many_meshes() -> list[nn.Parameter]:
    """As experts, hybrid sharding and tensor parallelism have them; more ranks than rows; one whole; one not used."""
    grid = two_by_two("ep_shard", "ep")
    line = flattened(grid, ("ep_shard", "ep"), "ranks")
    params = [
        spread((5, 6), line, [Shard(0)], 0),
        spread((2, 3), line, [Shard(0)], 1),  # ranks 2 and 3 have nothing
        spread((4, 6), grid, [Shard(1), Shard(0)], 2),
        spread((4, 6), grid, [Replicate(), Shard(0)], 3),
        spread((7,), grid, [Replicate(), Replicate()], 4),
        spread((9,), None, [], 5),
        spread((6,), line, [Shard(0)], 6),
    ]
    params[-1].grad = None
    return params


def plain(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """The same parameters and gradients, whole."""
    copies = [nn.Parameter(whole(param.detach())) for param in params]
    for copy, param in zip(copies, params, strict=True):
        copy.grad = None if param.grad is None else whole(param.grad).clone()
    return copies


@on_ranks(4)
def test_tensors_on_several_meshes_are_measured_as_one_vector() -> None:
    for norm_type in NORM_TYPES:
        params = params_on_many_meshes()
        copies = plain(params)
        expected = nn.utils.clip_grad_norm_(copies, 0.5, norm_type)
        with OpCounts() as counts:
            norm = clip_grad_norm_([*params, params[0]], 0.5, norm_type)  # one is given twice
        # Arguments are compared over all ranks, then each mesh dimension is crossed once: all ranks, ep_shard, ep.
        assert [name for _, name, _ in counts.sent] == [ALL_REDUCE] * 4
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
        for param, copy in zip(params, copies, strict=True):
            if copy.grad is not None:
                assert param.grad is not None
                torch.testing.assert_close(whole(param.grad), copy.grad, rtol=1e-5, atol=1e-8)


# ---- pipelines -------------------------------------------------------------------------------------------------------


def loss_by_layers(layers: Iterable[nn.Module], inputs: Tensor) -> Tensor:
    """A loss in which layers do not meet, so that each stage can compute its own part of it."""
    return torch.stack([layer(inputs).square().mean() for layer in layers]).sum()


@pytest.mark.parametrize("use_engine", [False, True])
@on_ranks(4)
def test_pipeline_ranks_clip_by_the_norm_of_all_stages(use_engine: bool) -> None:
    """Each pipeline rank has two of the layers, as parts of their own, sharded over two ranks."""
    mesh = two_by_two("pp", "dp")
    own = range(mesh["pp"].get_local_rank(), 4, 2)
    for norm_type in NORM_TYPES:
        reference = make_model()
        loss_by_layers(reference, make_inputs()).backward()
        want = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM, norm_type)
        layers = [make_model()[index] for index in own]
        if use_engine:
            parts = [shard_by_engine(layer, mesh["dp"]) for layer in layers]
        else:
            parts = [fully_shard(layer, mesh=mesh["dp"]) for layer in layers]
        loss_by_layers(parts, make_inputs()).backward()
        norm = clip_grad_norm_(parts, MAX_NORM, norm_type, pp_mesh=mesh["pp"])
        torch.testing.assert_close(norm, want, rtol=1e-5, atol=1e-7)
        for index, part in zip(own, parts, strict=True):
            assert_equal_tensors(gradients_of(part), gradients_of(reference[index]), rtol=1e-4, atol=1e-7)


# ---- what cannot be clipped ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_norm_that_is_not_finite_raises_on_every_rank() -> None:
    for norm_type in (2.0, math.inf):
        param = spread((4, 2), all_ranks(), [Shard(0)], 0)
        assert isinstance(param.grad, DTensor)
        if dist.get_rank() == 0:
            param.grad.to_local()[0, 0] = math.nan
        told = refusal(clip_grad_norm_, [param], 1.0, norm_type, error_if_nonfinite=True, error=NonFiniteNormError)
        assert "is nan" in told
        assert math.isnan(clip_grad_norm_([param], math.inf, norm_type))


@on_ranks(2)
def test_a_part_of_an_engines_parameters_is_refused() -> None:
    model = shard_by_engine(make_model(), all_ranks())
    model(make_inputs()).square().mean().backward()
    told = refusal(clip_grad_norm_, list(model.parameters())[:2], 1.0)
    assert "give the model or all of model.parameters()" in told


def test_arguments_that_mean_nothing_are_refused() -> None:
    param = nn.Parameter(torch.ones(2))
    for arguments in ({"norm_type": 0.0}, {"norm_type": -1.0}, {"max_norm": -1.0}, {"max_norm": math.nan}):
        refusal(clip_grad_norm_, [param], error=ConfigurationError, **{"max_norm": 1.0, **arguments})
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    assert "sparse=False" in refusal(clip_grad_norm_, sparse, 1.0, error=ConfigurationError)


def test_norms_are_measured_in_a_wider_dtype_and_those_of_nothing_are_zero() -> None:
    assert clip_grad_norm_([], 1.0).item() == clip_grad_norm_(nn.Linear(2, 2), 1.0, math.inf).item() == 0.0
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 0.01)
    norm = clip_grad_norm_(param, math.inf)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, param.grad.float().norm())
