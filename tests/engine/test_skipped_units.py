"""`ranks_may_skip_units`: ranks that take different paths, equal to one process on the batches of all of them."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import experimental, fsdp2, fully_shard, meet_ranks
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, on_ranks, refusal
from tests.support.zoo import FEATURES, Layer, Ordered

pytestmark = pytest.mark.unmerged
STEPS = 3
Microbatch = tuple[tuple[int, ...], bool | None]
"""The layers that it calls, in order, and whether its loss depends on the model's result; None: it only evaluates."""


class Recomputing(Ordered):
    """Units that are recomputed one by one."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = checkpoint(self.layers[index], x, use_reentrant=False)
        return x


def programs(draw: random.Random, num_ranks: int, order: Sequence[int]) -> list[list[list[Microbatch]]]:
    """Draw what each rank does in each step: some microbatches, of which each takes a path of its own."""

    def microbatch() -> Microbatch:
        path = tuple(layer for layer in order if draw.random() < 0.6)
        again = (path[0], *path) if path and draw.random() < 0.2 else path
        return again, draw.choice([True, True, True, False, None])

    return [[[microbatch() for _ in range(draw.randrange(3))] for _ in range(num_ranks)] for _ in range(STEPS)]


def inputs(step: int, rank: int, number: int) -> torch.Tensor:
    return torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))


def loss_of(model: nn.Module, layers: Ordered, step: int, rank: int, number: int, what: Microbatch) -> torch.Tensor:
    layers.order, depends = what
    with torch.set_grad_enabled(depends is not None):
        result = model(inputs(step, rank, number)).square().sum()
    return result if depends else result.detach() + torch.zeros((), requires_grad=True)


def build(kind: type[Ordered]) -> Ordered:
    with fixed_seed(3):
        return kind()


def train_whole(kind: type[Ordered], drawn: Sequence[Sequence[Sequence[Microbatch]]]) -> list[dict[str, Any]]:
    """The gradients and weights of one process on the microbatches of all ranks."""
    model = build(kind)
    optimizer = sgd(model)
    noted = []
    for step, ranks in enumerate(drawn):
        for rank, microbatches in enumerate(ranks):
            for number, what in enumerate(microbatches):
                (loss_of(model, model, step, rank, number, what) / len(ranks)).backward()
        noted.append({name: param.grad for name, param in model.named_parameters()})
        noted[-1] = {name: None if grad is None else grad.clone() for name, grad in noted[-1].items()}
        optimizer.step()
        optimizer.zero_grad()
        noted.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return noted


def by_wrapper(model: Ordered, skips: Any, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    options = {"fsdp_unit_modules": [Layer], **options}
    return fully_shard(model, sgd(model), ranks_may_skip_units=skips, **options)


def by_fsdp2(model: Ordered, skips: Any, _options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    for layer in model.layers:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model, ranks_may_skip_units=skips)
    return model, sgd(model)


def per_module(model: Ordered, skips: Any, _options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    zero3 = experimental.Placements(["dp"], *[[Shard(0)]] * 3)
    with experimental.fully_shard_context(ranks_may_skip_units=skips):
        for module in (*model.layers, model):
            experimental.fully_shard(module, mesh, zero3)
    return model, sgd(model)


DOORS = {"wrapper": by_wrapper, "fsdp2": by_fsdp2, "per module": per_module}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def full(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor()
    return found


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "3": {},
    "2": {"zero_dp_strategy": 2},
    "1": {"zero_dp_strategy": 1},
    "three slots": {"max_gathered_units": 3, "forward_prefetch_units": 2, "backward_prefetch_units": 2},
    "each has memory": {"weight_allocator": "resize"},
    "at the step": {"sync_model_each_microbatch": False},
    "HSDP": {"dp_outer_dim": "outer", "dp_shard_dim": "inner"},
    "HFSDP": {"dp_outer_dim": "outer", "dp_shard_dim": "inner", "outer_dp_sharding_strategy": 1},
    "an order": {"order": (2, 0, 1, 3)},
}


@pytest.mark.full(short=["3-at the step-wrapper-Recomputing", "2-3-per module-Ordered"])
@pytest.mark.parametrize(
    ("num_ranks", "arranged", "door", "kind"),
    [
        *[(2, each, "wrapper", "Ordered") for each in ("3", "2", "an order")],
        *[(3, each, "wrapper", "Recomputing") for each in ("1", "at the step", "each has memory", "three slots")],
        *[(4, each, "wrapper", "Ordered") for each in ("HSDP", "HFSDP")],
        *[(2, "3", "fsdp2", "Recomputing"), (3, "an order", "fsdp2", "Ordered")],
        *[(2, "3", "per module", "Ordered"), (3, "an order", "per module", "Recomputing")],
    ],
)
@on_ranks()
def test_paths_of_ranks_equal_one_process(num_ranks: int, arranged: str, door: str, kind: str) -> None:
    cls = Recomputing if kind == "Recomputing" else Ordered
    options = dict(ARRANGEMENTS[arranged])
    order = options.pop("order", None)
    if "dp_outer_dim" in options:
        options["device_mesh"] = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("outer", "inner"))
        options["hybrid_fsdp_group"] = dist.group.WORLD
    for seed in range(4):
        drawn = programs(random.Random(seed), num_ranks, order or range(4))
        expected = iter(train_whole(cls, drawn))
        model = build(cls)
        skips = True if order is None else [model.layers[index] for index in order]
        sharded, optimizer = DOORS[door](model, skips, options)
        rank = dist.get_rank()
        for step, ranks in enumerate(drawn):
            for number, what in enumerate(ranks[rank]):
                loss_of(sharded, model, step, rank, number, what).backward()
            sharded.finish_grad_sync() if arranged == "at the step" else meet_ranks(sharded)
            grads = {name: param.grad for name, param in model.named_parameters()}
            found = {name: full(grad) for name, grad in grads.items() if grad is not None}
            wanted = {name: grad for name, grad in next(expected).items() if grad is not None}
            assert_equal_tensors(found, wanted, rtol=1e-5, atol=1e-6)
            optimizer.step()
            optimizer.zero_grad()
            weights = {name: full(param.detach()) for name, param in model.named_parameters()}
            assert_equal_tensors(weights, next(expected), rtol=1e-5, atol=1e-6)


@on_ranks(3)
def test_ranks_generate_texts_of_different_lengths_and_meet() -> None:
    model = build(Ordered)
    sharded, _ = by_wrapper(model, True, {})
    with torch.no_grad():
        results = [sharded(inputs(0, dist.get_rank(), number)) for number in range(1 + 2 * dist.get_rank())]
    meet_ranks(sharded)
    count = torch.tensor(len(results))
    dist.all_reduce(count)
    assert int(count) == 1 + 3 + 5
    with torch.no_grad(), fixed_seed(3):
        expected = Ordered()(inputs(0, dist.get_rank(), 0))
    torch.testing.assert_close(results[0], expected)
    filled = 4 * (5 - len(results))
    assert f"this rank has gathered {filled} units only for others" in str(sharded.describe())


@pytest.mark.parametrize("door", ["wrapper", "fsdp2"])
@on_ranks(2)
def test_a_rank_that_only_evaluates_steps_with_the_others(door: str) -> None:
    is_first = dist.get_rank() == 0
    model = build(Ordered)
    sharded, optimizer = DOORS[door](model, True, {})
    for step in range(2):
        optimizer.zero_grad()
        for number in range(2 if is_first else 0):
            loss_of(sharded, model, step, 0, number, ((1, 3), True)).backward()
        with torch.inference_mode():
            for number in range(0 if is_first else 3 * step):
                sharded(inputs(step, 1, number))
        optimizer.step()
        count = torch.ones(())
        dist.all_reduce(count)
        assert float(count) == 2
    drawn = [[[((1, 3), True)] * 2, []]] * 2
    expected = train_whole(Ordered, drawn)[-1]
    weights = {name: full(param.detach()) for name, param in model.named_parameters()}
    assert_equal_tensors(weights, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_forward_that_fails_on_one_rank_leaves_the_others_alone() -> None:
    model = build(Ordered)
    sharded, optimizer = by_wrapper(model, True, {})
    for step in range(2):
        if dist.get_rank() == step:
            model.order = (0, 2)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                sharded(torch.ones(2, FEATURES + 1))
        loss_of(sharded, model, step, dist.get_rank(), 0, ((1, 2), True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = train_whole(Ordered, [[[((1, 2), True)]] * 2] * 2)[-1]
    weights = {name: full(param.detach()) for name, param in model.named_parameters()}
    assert_equal_tensors(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("option", ["verify_ranks", "cuda_graph_mode"])
@on_ranks(2)
def test_options_that_need_equal_steps_are_refused(option: str) -> None:
    found = refusal(by_wrapper, build(Ordered), True, {option: True}, error=ConfigurationError)
    assert "ranks_may_skip_units and " + option in found


@on_ranks(2)
def test_what_cannot_be_ordered_is_refused() -> None:
    model = build(Ordered)
    assert "has a Linear that is no module of the model" in refusal(
        by_wrapper, model, [nn.Linear(2, 2)], {}, error=ConfigurationError
    )
    assert "leaves out 3 units, such as layers.1" in refusal(
        by_wrapper, model, [model.layers[0]], {}, error=ConfigurationError
    )
    sharded, _ = by_wrapper(build(Ordered), True, {"sync_model_each_microbatch": False})
    sharded.is_last_microbatch = dist.get_rank() == 0
    loss = sharded(inputs(0, 0, 0)).sum()
    assert "backward that some reduce further than others" in refusal(loss.backward, error=ScheduleError)
    whole, _ = by_wrapper(build(Ordered), False, {})
    assert "shard the model with ranks_may_skip_units=True" in refusal(meet_ranks, whole, error=ConfigurationError)
