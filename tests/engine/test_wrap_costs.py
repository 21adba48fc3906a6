"""What wrapping a model costs, in counts: few collectives, whatever the model's size, and equal blocks planned once."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from megatron_fsdp import fully_shard
from megatron_fsdp.engine import domains as sharding_file
from megatron_fsdp.engine.wrap import GroupPlanner
from tests.conftest import RunRanks
from tests.support.seams import engine_of

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce_scatter_tensor",
    "scatter",
)
EXPECTED = {"all_gather": 2, "all_reduce": 1}
"""The optimizer's parameters and the model are agreed on, and a hash of every tensor compared."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 10)
        self.outer = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.outer(self.inner(x).relu()))


def build(num_blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *(Block() for _ in range(num_blocks)), nn.Linear(6, 2))


def wrap(model: nn.Module) -> Any:
    return fully_shard(model, torch.optim.AdamW(model.parameters()), fsdp_unit_modules=[Block])[0]


def collectives(num_blocks: int) -> dict[str, int]:
    """How often each was called while a model was wrapped; one that another calls counts as well."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(distributed_c10d, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    model = build(num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            stand_in = counted(name)
            for module in (dist, distributed_c10d):
                patch.setattr(module, name, stand_in)
        wrap(model)
    return dict(calls)


@pytest.mark.parametrize("num_blocks", [1, 6])
def test_three_small_collectives_are_all(run_ranks: RunRanks, num_blocks: int) -> None:
    for calls in run_ranks(2, collectives, num_blocks):
        assert calls == EXPECTED


def planned(num_blocks: int) -> tuple[int, list[list[int]], list[list[int]], list[list[tuple[int, ...]]]]:
    """Layouts planned; for each unit which layout and cuts it has, by when they came first; local shapes."""
    calls, real = [], sharding_file.plan_layout

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding_file, "plan_layout", counted)
        model = wrap(build(num_blocks))
    numbers: dict[int, int] = {}

    def number(thing: object) -> int:
        return numbers.setdefault(id(thing), len(numbers))

    groups = [unit.groups[0] for unit in engine_of(model).units]
    layouts = [[number(group.plan.layout)] for group in groups]
    cuts = [[number(frame.description) for frame in group.frames] for group in groups]
    shapes = [[tuple(param.to_local().shape) for param in group.sharded] for group in groups]
    return len(calls), layouts, cuts, shapes


def test_equal_blocks_have_one_layout_and_the_same_descriptions(run_ranks: RunRanks) -> None:
    for num_planned, layouts, cuts, shapes in run_ranks(2, planned, 5):
        assert num_planned == 2
        assert layouts == [[0], *[[1]] * 5]
        root, *blocks = cuts
        assert root == [2, 3, 4, 5]
        assert blocks == [[6, 7, 8, 9, 10, 11]] * 5
        assert shapes[1:] == [shapes[1]] * 5


def other_kinds() -> tuple[bool, bool, bool, bool]:
    """Whether two groups share descriptions of shards: equal ones; frozen beside trained; other shapes; experts."""
    model = wrap(build(2))
    first, second = (engine_of(model).units[index].groups[0].plan.spec for index in (1, 2))
    originals = [nn.Parameter(torch.empty(info.shape)) for info in first.parameters]
    plans = GroupPlanner(engine_of(model)._sharding)

    def share(spec: Any, other: Any, others: list[nn.Parameter]) -> bool:
        (plan, frames), (other_plan, other_frames) = plans.plan(spec, originals), plans.plan(other, others)
        assert (plan.spec, other_plan.spec) == (spec, other)
        assert all(frame is not other for frame, other in zip(frames, other_frames, strict=False))
        return all(a.description is b.description for a, b in zip(frames, other_frames, strict=False))

    frozen = replace(second, key=replace(second.key, requires_grad=False))
    shorter = replace(second, parameters=second.parameters[:-1])
    experts = [replace(each, key=replace(each.key, is_expert=True)) for each in (first, second)]
    return (
        share(first, second, originals),
        share(first, frozen, originals),
        share(first, shorter, originals[:-1]),
        share(experts[0], experts[1], originals),
    )


def test_only_groups_that_are_alike_share_descriptions(run_ranks: RunRanks) -> None:
    for shared in run_ranks(2, other_kinds):
        assert shared == (True, False, False, True)
