"""What wrapping a model costs, in counts: few collectives, equal blocks planned once, and only features that it has."""

from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_fsdp.engine import plans
from tests.support.case import adamw_above_noise, shard
from tests.support.on_ranks import engine_of, on_ranks
from tests.support.zoo import Ordered, vector_case
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


def wrap(num_layers: int) -> Any:
    return shard(vector_case(partial(Ordered, layers=num_layers)), adamw_above_noise)[0]


@pytest.mark.parametrize("num_layers", [1, 6])
@on_ranks(2)
def test_eight_small_collectives_are_all(num_layers: int) -> None:
    """One that another calls counts as well."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(distributed_c10d, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            proxy = counted(name)
            for module in (dist, distributed_c10d):
                patch.setattr(module, name, proxy)
        wrap(num_layers)
    assert calls == EXPECTED


@on_ranks(2)
def test_equal_blocks_have_one_layout_and_the_same_descriptions() -> None:
    with mock.patch.object(plans, "plan_layout", wraps=plans.plan_layout) as planned:
        model = wrap(5)
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
    folders = {file.partition("/")[0] for file, _ in calls_in(lambda: wrap(1))}
    assert {"wrap", "engine", "optim"} <= folders
    assert folders.isdisjoint({"formats", "debug", "hang", "describe", "checkpoint"})
