"""`ranks_may_skip_units`: ranks that take different paths, equal to one process on the batches of all of them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from megatron_fsdp import experimental, fsdp2, meet_ranks
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid, mesh_of
from tests.support.case import Run, Scenario, Setting, check_strategies, momentum
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.zoo import FEATURES, Ordered, Recomputed, vector_case

pytestmark = pytest.mark.unmerged
STEPS = 3
Microbatch = tuple[tuple[int, ...], bool | None]
"""The layers that it calls, in order, and whether its loss depends on the model's result; None: it only evaluates."""
CASES = {"Ordered": vector_case(Ordered), "Recomputing": vector_case(partial(Recomputed, "units", False))}


@dataclass(frozen=True)
class Skips(Setting):
    """A setting in which ranks may skip units, by one of the doors, in the order of the units if it is told."""

    strategy: int = 3
    door: str = "wrapper"
    order: tuple[int, ...] | None = None

    def shard(self, scenario: Scenario, model: Any) -> tuple[Any, torch.optim.Optimizer]:
        skips = True if self.order is None else [model.layers[index] for index in self.order]
        if self.door == "wrapper":
            told = {"ranks_may_skip_units": skips, **dict(self.options)}
            return Setting.shard(replace(self, options=tuple(told.items())), scenario, model)
        if self.door == "fsdp2":
            for layer in model.layers:
                fsdp2.fully_shard(layer)
            fsdp2.fully_shard(model, ranks_may_skip_units=skips)
        else:
            mesh, zero3 = mesh_of((dist.get_world_size(),), ("dp",)), [[Shard(0)]] * 3
            with experimental.fully_shard_context(ranks_may_skip_units=skips):
                for module in (*model.layers, model):
                    experimental.fully_shard(module, mesh, experimental.Placements(["dp"], *zero3))
        return model, scenario.optimizer(model)


def programs(draw: random.Random, num_ranks: int, order: Sequence[int]) -> list[list[list[Microbatch]]]:
    """Draw what each rank does in each step: some microbatches, of which each takes a path of its own."""

    def microbatch() -> Microbatch:
        path = tuple(layer for layer in order if draw.random() < 0.6)
        again = (path[0], *path) if path and draw.random() < 0.2 else path
        return again, draw.choice([True, True, True, False, None])

    return [[[microbatch() for _ in range(draw.randrange(3))] for _ in range(num_ranks)] for _ in range(STEPS)]


def inputs(step: int, rank: int, number: int) -> torch.Tensor:
    return torch.randn(2, FEATURES, generator=torch.Generator().manual_seed(100 * step + 10 * rank + number))


def backward(run: Run, step: int, rank: int, number: int, what: Microbatch) -> None:
    run.module.order, depends = what  # type: ignore[assignment]
    with torch.set_grad_enabled(depends is not None):
        result = run.model(inputs(step, rank, number)).square().sum() / len(run.ranks_here)
    (result if depends else result.detach() + torch.zeros((), requires_grad=True)).backward()


def take_paths(run: Run, seed: int, order: Sequence[int], at_step: bool) -> None:
    for step, ranks in enumerate(programs(random.Random(seed), run.num_ranks, order)):
        for rank in run.ranks_here:
            for number, what in enumerate(ranks[rank]):
                backward(run, step, rank, number, what)
        if run.sharded is not None:
            run.sharded.finish_grad_sync() if at_step else meet_ranks(run.sharded)
        run.step()


ARRANGEMENTS: dict[str, Skips] = {
    "3": Skips(),
    "2": Skips(2),
    "1": Skips(1),
    "three slots": Skips(
        options=(("max_gathered_units", 3), ("forward_prefetch_units", 2), ("backward_prefetch_units", 2))
    ),
    "each has memory": Skips(options=(("weight_allocator", "resize"),)),
    "at the step": Skips(auto_sync=False),
    "HSDP": Skips(arrangement=hybrid(2, 2)),
    "HFSDP": Skips(arrangement=hybrid(2, 2), outer_strategy=1),
    "an order": Skips(order=(2, 0, 1, 3)),
}


@pytest.mark.full(
    short=["3-at the step-wrapper-Recomputing", "2-3-fsdp2-Recomputing", "2-3-per module-Ordered"],
)
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
def test_paths_of_ranks_equal_one_process(
    run_ranks: RunRanks, num_ranks: int, arranged: str, door: str, kind: str
) -> None:
    setting = replace(ARRANGEMENTS[arranged], door=door)
    for seed in range(4):
        script = partial(take_paths, seed=seed, order=setting.order or range(4), at_step=arranged == "at the step")
        check_strategies(run_ranks, num_ranks, Scenario(script, CASES[kind], momentum), [setting])


@on_ranks(3)
def test_ranks_generate_texts_of_different_lengths_and_meet() -> None:
    sharded = sharded_by(Skips())
    with torch.no_grad():
        results = [sharded(inputs(0, dist.get_rank(), number)) for number in range(1 + 2 * dist.get_rank())]
    meet_ranks(sharded)
    count = torch.tensor(len(results))
    dist.all_reduce(count)
    assert int(count) == 1 + 3 + 5
    with torch.no_grad(), fixed_seed(0):
        expected = Ordered()(inputs(0, dist.get_rank(), 0))
    torch.testing.assert_close(results[0], expected)
    filled = 4 * (5 - len(results))
    assert f"this rank has gathered {filled} units only for others" in str(sharded.describe())


def evaluate_on_one(run: Run) -> None:
    """Rank 0 has two microbatches in each step; rank 1 evaluates, and more in each."""
    for step in range(2):
        for rank in run.ranks_here:
            for number in range(0 if rank else 2):
                backward(run, step, rank, number, ((1, 3), True))
            with torch.inference_mode():
                for number in range(3 * step if rank else 0):
                    run.model(inputs(step, 1, number))
        run.optimizer.step()
        if run.sharded is not None:
            count = torch.ones(())
            dist.all_reduce(count)
            assert count == run.num_ranks
        run.note_parameters()
        run.optimizer.zero_grad()


def fail_on_one(run: Run) -> None:
    """A forward fails on another rank in each step."""
    for step in range(2):
        for rank in run.ranks_here:
            if run.sharded is not None and rank == step:
                run.module.order = (0, 2)  # type: ignore[assignment]
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    run.model(torch.ones(2, FEATURES + 1))
            backward(run, step, rank, 0, ((1, 2), True))
        run.optimizer.step()
        run.note_parameters()
        run.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("script", "door"), [(evaluate_on_one, "wrapper"), (evaluate_on_one, "fsdp2"), (fail_on_one, "wrapper")]
)
def test_ranks_that_evaluate_or_fail_step_with_the_others(
    run_ranks: RunRanks, script: Callable[[Run], None], door: str
) -> None:
    check_strategies(run_ranks, 2, Scenario(script, CASES["Ordered"], momentum), [Skips(door=door)])


def sharded_by(setting: Setting, **options: Any) -> Any:
    options = {**dict(setting.options), **options}
    run = Run(Scenario(fail_on_one, CASES["Ordered"]), replace(setting, options=tuple(options.items())))
    return run.sharded


@pytest.mark.parametrize("option", ["verify_ranks", "cuda_graph_mode"])
@on_ranks(2)
def test_options_that_need_equal_steps_are_refused(option: str) -> None:
    found = refusal(sharded_by, Skips(), **{option: True}, error=ConfigurationError)
    assert "ranks_may_skip_units and " + option in found


@on_ranks(2)
def test_what_cannot_be_ordered_is_refused() -> None:
    other = refusal(sharded_by, Skips(), ranks_may_skip_units=[nn.Linear(2, 2)], error=ConfigurationError)
    assert "has a Linear that is no module of the model" in other
    found = refusal(sharded_by, Skips(order=(0,)), error=ConfigurationError)
    assert "leaves out 3 units, such as layers.1" in found
    sharded = sharded_by(Skips(auto_sync=False))
    sharded.is_last_microbatch = dist.get_rank() == 0
    loss = sharded(inputs(0, 0, 0)).sum()
    assert "backward that some reduce further than others" in refusal(loss.backward, error=ScheduleError)
    whole = sharded_by(Setting(3))
    assert "shard the model with ranks_may_skip_units=True" in refusal(meet_ranks, whole, error=ConfigurationError)
