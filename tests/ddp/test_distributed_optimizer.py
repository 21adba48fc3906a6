"""`DistributedOptimizer`: one object for sync, clipping, step and gathers, accepted wherever an optimizer is."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronFSDP,
    fully_shard,
    fully_shard_optimizer,
)
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.ddp import DistributedOptimizer
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.api_net import Layer, backward, batches, build, largest_difference, mesh, train, weights, wrap
from tests.support.dcp_contents import whole_state
from tests.support.on_ranks import on_ranks, refusal

TOLERANCE = 2e-6
CLIP = 0.05
"""Well below the norm of the gradients, so that every step clips."""


def buckets(dtype: torch.dtype = torch.float32, **fields: Any) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=30, **fields)
    return DistributedDataParallel(config, build().to(dtype))


def units(strategy: int, dtype: torch.dtype = torch.float32, **arguments: Any) -> MegatronFSDP:
    return wrap(strategy, build().to(dtype), **arguments)


MODELS: dict[str, Callable[[], MegatronFSDP]] = {
    **{f"units {strategy}": partial(units, strategy) for strategy in range(4)},
    "units 3, by hand": lambda: units(3, sync_model_each_microbatch=False),
    "buckets": lambda: buckets(),
    "buckets, sharded": lambda: buckets(use_distributed_optimizer=True),
    "buckets, overlapped": lambda: buckets(use_distributed_optimizer=True, overlap_param_gather=True),
}
SAVED = {
    **MODELS,
    "buckets, bfloat16": lambda: buckets(torch.bfloat16, use_distributed_optimizer=True),
    "buckets, two instances": lambda: buckets(use_distributed_optimizer=True, num_distributed_optimizer_instances=2),
}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def one_process(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after clipped steps of one process, and the norm of each."""
    model = build()
    optimizer, norms = adamw(model), []
    for batch in batches(steps):
        optimizer.zero_grad()
        backward(model, batch)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return weights(model), norms


# ---- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks()
def test_a_step_syncs_clips_and_updates_as_one_process_does() -> None:
    expected, norms = one_process(3)
    for name, make in MODELS.items():
        model = make()
        optimizer = DistributedOptimizer(adamw(model), model, clip_grad=CLIP)
        assert optimizer.grad_norm is None
        for batch, norm in zip(batches(3), norms, strict=True):
            optimizer.zero_grad()
            backward(model, batch)
            assert optimizer.step() is None
            assert optimizer.grad_norm is not None
            assert abs(optimizer.grad_norm.item() - norm) <= TOLERANCE, name
        by_hand = make()
        plain = fully_shard_optimizer(adamw(by_hand))
        for batch in batches(3):
            plain.zero_grad()
            backward(by_hand, batch)
            by_hand.clip_grad_norm_(CLIP)
            plain.step()
        assert largest_difference(weights(model), expected) <= 5 * TOLERANCE, name
        assert largest_difference(weights(model), weights(by_hand)) == 0.0, name


@on_ranks(2)
def test_a_closure_is_run_and_its_loss_returned() -> None:
    runs = []
    for uses_closure in (True, False):
        wrapped = units(3)
        optimizer = DistributedOptimizer(adamw(wrapped), wrapped, clip_grad=CLIP)
        for batch in batches(3):

            def closure(batch: Any = batch, model: Any = wrapped, optimizer: Any = optimizer) -> float:
                optimizer.zero_grad()
                return backward(model, batch)

            if uses_closure:
                assert isinstance(optimizer.step(closure), float)
            else:
                closure()
                optimizer.step()
        runs.append(weights(wrapped))
    assert largest_difference(*runs) == 0.0


def fill(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)


@pytest.mark.parametrize(
    ("dtype", "started"), [(torch.float32, [True, False, False]), (torch.bfloat16, [True, True, True])]
)
@on_ranks(2)
def test_gathers_start_where_they_cannot_undo_writes(dtype: torch.dtype, started: list[bool]) -> None:
    overlapped = partial(buckets, use_distributed_optimizer=True, overlap_param_gather=True)
    for make, starts in zip((partial(units, 3), partial(units, 1), overlapped), started, strict=True):
        model, reference = make(dtype=dtype), build().to(dtype)
        optimizer = DistributedOptimizer(adamw(model), model)
        backward(model, next(batches(1)))
        before = model.traffic().gathers
        optimizer.step()
        assert (model.traffic().gathers > before) is starts
        fill(model)
        fill(reference)
        inputs = torch.ones(2, 5, dtype=dtype)
        assert torch.equal(model(inputs), reference(inputs))


# ---- as any optimizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_clipping_sees_unscaled_gradients_under_a_scaler(fused: bool) -> None:
    runs, ends = [], []
    models: list[nn.Module] = [buckets(use_distributed_optimizer=True), build()]
    for model in models:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        is_wrapped = isinstance(model, MegatronFSDP)
        if isinstance(model, MegatronFSDP):
            optimizer = DistributedOptimizer(optimizer, model, clip_grad=CLIP)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
        for number, (inputs, _) in enumerate(batches(4)):
            own = inputs.chunk(dist.get_world_size())[dist.get_rank()] if is_wrapped else inputs
            optimizer.zero_grad()
            is_bad = number == 1 and (not is_wrapped or dist.get_rank() == 1)
            scaler.scale(model(own).square().mean() * (float("inf") if is_bad else 1.0)).backward()
            if not is_wrapped:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            scaler.step(optimizer)
            scaler.update()
        runs.append(weights(model))
        ends += [scaler.get_scale(), *sorted({float(state["step"]) for state in optimizer.state.values()})]
    assert largest_difference(*runs) <= 5 * TOLERANCE
    assert ends == [512.0, 3.0, 512.0, 3.0]


@on_ranks(2)
def test_groups_zeros_and_bad_arguments() -> None:
    """Zeros in gradients, groups that are added, refusals, and an optimizer that was built before the model was."""
    model = units(2)
    params = list(model.parameters())
    optimizer = DistributedOptimizer(torch.optim.SGD(params[:2], lr=0.1), model)
    optimizer.add_param_group({"params": iter(params[2:]), "lr": 0.2})
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 5]
    hooks = len(optimizer.inner_optimizer._optimizer_step_pre_hooks)
    assert fully_shard_optimizer(optimizer) is optimizer
    assert len(optimizer.inner_optimizer._optimizer_step_pre_hooks) == hooks
    with model.no_sync():
        (model(torch.zeros(2, 5)).sum() * 0.0).backward()
    assert optimizer.count_zeros() == 82
    attempts: dict[str, Callable[[], Any]] = {
        "none of the wrapped": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        "cannot be wrapped": lambda: DistributedOptimizer(optimizer, model),
        "is not a parameter of": lambda: DistributedOptimizer(adamw(build()), model),
        "wrap it first": lambda: DistributedOptimizer(adamw(model), build()),  # type: ignore[arg-type]
        "clip_grad=-1.0": lambda: DistributedOptimizer(adamw(model), model, clip_grad=-1.0),
        "clip_grad=nan": lambda: DistributedOptimizer(adamw(model), model, clip_grad=float("nan")),
        "cannot be pickled": lambda: pickle.dumps(optimizer),
    }
    for words, attempt in attempts.items():
        assert words in refusal(attempt, error=ConfigurationError)
    early, reference = build(), build()
    wrapped, connected = fully_shard(early, adamw(early), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=3)
    train(wrapped, DistributedOptimizer(connected, wrapped), 2)
    train(reference, adamw(reference), 2)
    assert largest_difference(weights(wrapped), weights(reference)) <= TOLERANCE


def made_for_checkpoint(name: str) -> tuple[MegatronFSDP, DistributedOptimizer]:
    model = SAVED[name]()
    return model, DistributedOptimizer(adamw(model), model, clip_grad=CLIP)


def save(folder: str, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = made_for_checkpoint(name)
    train(model, optimizer, 3)
    save_checkpoint(model, optimizer, folder, iteration=3)
    return weights(model), whole_state(model, optimizer)


def load(folder: str, name: str, plain: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Weights and state of fresh objects after loading; whether training goes on from there."""
    model, wrapped = made_for_checkpoint(name)
    optimizer = wrapped.inner_optimizer if plain else wrapped
    load_checkpoint(model, optimizer, folder)
    found = weights(model), whole_state(model, optimizer)
    train(model, optimizer, 1, first=3)
    return *found, largest_difference(weights(model), found[0]) > 0


LOADED = ((3, "buckets, sharded"), (1, "buckets"), (3, "units 3"), (4, "buckets, two instances"))


@pytest.mark.full(short=["buckets, bfloat16"])
@pytest.mark.parametrize("saved", ["buckets, bfloat16", "units 3"])
def test_a_checkpoint_loads_on_other_ranks_and_strategies(tmp_path: Path, run_ranks: RunRanks, saved: str) -> None:
    (expected, state), _ = run_ranks(2, save, str(tmp_path), saved)
    assert any(value.any() for value in state.values())
    for ranks, name in LOADED if saved == "units 3" else ((3, saved), (2, saved)):
        for weights_found, state_found, moved in run_ranks(ranks, load, str(tmp_path), name, ranks == 2):
            assert largest_difference(weights_found, expected) == 0.0
            assert largest_difference(state_found, state) == 0.0
            assert moved
