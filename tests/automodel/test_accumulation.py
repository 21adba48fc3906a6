"""Gradient accumulation under the three strategies: the gradients of the whole batch, and when they are reduced."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp.automodel import (
    DDPConfig,
    DDPManager,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    accumulation_context,
    create_device_mesh,
)
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.process_groups import groups_destroyed
from tests.automodel.small_models import batch_of, build, label_count, reference, token_loss_sum
from tests.automodel.training import assert_close, optimizer_of, plain_name, strategy, whole
from tests.conftest import RunRanks
from tests.support.op_counts import OpCounts

STRATEGIES = ("fsdp2", "megatron_fsdp", "ddp")


def parallel(config: Any, kind: str = "llama", **sizes: int) -> nn.Module:
    """A small model made parallel as a manager does it."""
    mesh, _ = create_device_mesh(config, **sizes)
    if isinstance(config, DDPConfig):
        return DDPManager(config).parallelize(build(kind))
    assert mesh is not None
    if isinstance(config, MegatronFSDPConfig):
        return MegatronFSDPManager(config, mesh).parallelize(build(kind))[0]
    assert isinstance(config, FSDP2Config)
    return FSDP2Manager(config, mesh).parallelize(build(kind))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def accumulate(model: nn.Module, microbatches: int, rows: int, seed: int, **options: Any) -> tuple[float, list[int]]:
    """Backward of all microbatches; the loss of the whole batch, and how often each microbatch reduced gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = batch_of(rows, seed=seed)
    own = {name: value.chunk(ranks)[rank].chunk(microbatches) for name, value in batch.items()}
    total, reductions = torch.zeros(()), []
    for index in range(microbatches):
        with OpCounts(ranks) as counts, accumulation_context(model, index == microbatches - 1, **options):
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
    with groups_destroyed():
        model = parallel(strategy(name, **fields))
        optimizer = optimizer_of(model)
        seen = []
        for step in range(2):
            optimizer.zero_grad()
            loss, reductions = accumulate(model, microbatches, rows, seed=1 + step)
            seen.append(reductions)
            assert abs(loss - expected.losses[step]) < 1e-5
            grads = gradients(model)
            assert_close(grads, expected.gradients[step], 1e-4, 1e-5, f"gradients of step {step}")
            optimizer.step()
            found = {plain_name(key): whole(param) for key, param in model.named_parameters()}
            assert_close(found, expected.parameters[step], 2e-4, 2e-4, f"weights, step {step}")
        return seen


@pytest.mark.full(short=["2-ddp", "3-megatron_fsdp"])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches_give_the_gradients_of_the_whole_batch_with_one_reduction(
    run_ranks: RunRanks, name: str, microbatches: int
) -> None:
    for seen in run_ranks(2, accumulate_like_the_whole_batch, name, microbatches):
        for reductions in seen:
            assert reductions[:-1] == [0] * (microbatches - 1)
            assert reductions[-1] > 0


def reduce_every_time(name: str) -> list[int]:
    expected = reference("llama", rows=6, steps=1)
    with groups_destroyed():
        model = parallel(strategy(name))
        _, reductions = accumulate(model, 3, 6, 1, defer_grad_sync=False)
        grads = gradients(model)
        assert_close(grads, expected.gradients[0], 1e-4, 1e-5, "gradients")
        return reductions


@pytest.mark.full(short=["fsdp2"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_without_deferral_every_microbatch_reduces_and_the_sum_is_the_same(run_ranks: RunRanks, name: str) -> None:
    for reductions in run_ranks(2, reduce_every_time, name):
        assert reductions[0] >= reductions[1] > 0  # the engine's first backward also agrees on unused parameters
        assert reductions[1] == reductions[2]


def read_from_the_config() -> list[list[int]]:
    found = []
    for defers in (True, False):
        with groups_destroyed():
            model = parallel(strategy("fsdp2", defer_fsdp_grad_sync=defers))
            found.append(accumulate(model, 2, 4, 1)[1])
            found.append(accumulate(model, 2, 4, 1, defer_grad_sync=not defers)[1])
    return found


def test_config_says_whether_fsdp2_defers_and_the_argument_overrules_it(run_ranks: RunRanks) -> None:
    units = 5  # four layers and the root
    for found in run_ranks(2, read_from_the_config):
        assert found == [[0, units], [units, units], [units, units], [0, units]]


def fail_inside() -> None:
    with groups_destroyed():
        for name in STRATEGIES:
            model = parallel(strategy(name))
            with pytest.raises(KeyError, match=r"inside"), accumulation_context(model, False):
                raise KeyError("inside")
            batch = batch_of(2)
            with OpCounts(2) as counts:
                model(input_ids=batch["input_ids"], use_cache=False).logits.sum().backward()
            assert counts.collectives.reductions > 0, name


def test_exception_inside_leaves_the_model_reducing_again(run_ranks: RunRanks) -> None:
    run_ranks(2, fail_inside)


def test_model_that_no_strategy_made_parallel_is_refused() -> None:
    message = r"^the model is a Linear; give what a manager"
    with pytest.raises(ConfigurationError, match=message), accumulation_context(nn.Linear(2, 2), True):
        pass
