"""What wrapping a model costs, in counts: few collectives, equal blocks planned once, and only features that it has."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from megatron_fsdp import fully_shard
from megatron_fsdp.engine import group_plan
from tests.support.on_ranks import engine_of, on_ranks
from tools.files_per_step import calls_in

pytestmark = pytest.mark.unmerged

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
EXPECTED = {"all_gather": 7, "all_reduce": 1}
"""Ranks agree on the arguments, the model, its plan and the optimizer, and compare a hash of every tensor."""


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


@pytest.mark.parametrize("num_blocks", [1, 6])
@on_ranks(2)
def test_eight_small_collectives_are_all(num_blocks: int) -> None:
    """One that another calls counts as well."""
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
            proxy = counted(name)
            for module in (dist, distributed_c10d):
                patch.setattr(module, name, proxy)
        wrap(model)
    assert calls == EXPECTED


@on_ranks(2)
def test_equal_blocks_have_one_layout_and_the_same_descriptions() -> None:
    with mock.patch.object(group_plan, "plan_layout", wraps=group_plan.plan_layout) as planned:
        model = wrap(build(5))
    assert planned.call_count == 2
    root, *blocks = (unit.groups[0] for unit in engine_of(model).units)
    first = blocks[0]
    assert root.plan.layout is not first.plan.layout
    shapes = [param.to_local().shape for param in first.sharded]
    for block in blocks:
        assert block.plan.layout is first.plan.layout
        assert all(a is not b for a, b in zip(block.shard_specs, first.shard_specs, strict=True)) or block is first
        assert all(a.description is b.description for a, b in zip(block.shard_specs, first.shard_specs, strict=True))
        assert [param.to_local().shape for param in block.sharded] == shapes
    descriptions = {id(shard_spec.description) for group in (root, first) for shard_spec in group.shard_specs}
    assert len(descriptions) == len(root.shard_specs) + len(first.shard_specs)  # each parameter its own


@on_ranks(2)
def test_a_plain_model_runs_through_no_format_check_or_log() -> None:
    model = build(1)
    folders = {file.partition("/")[0] for file, _ in calls_in(lambda: wrap(model))}
    assert {"wrap", "engine", "optim"} <= folders
    assert folders.isdisjoint({"formats", "debug", "hang", "describe", "checkpoint"})
