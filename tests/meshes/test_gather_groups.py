"""`fsdp_group_ag` and `expt_fsdp_group_ag`: weights are gathered on groups of their own, and nothing else is."""

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp import fully_shard_model
from tests.conftest import RunRanks
from tests.support.arrangements import Arrangement, hybrid_arguments, mesh_of
from tests.support.case import Scenario, Setting, check_strategies, shard, two_steps
from tests.support.counting import ALL_REDUCE, EXCHANGE, GATHER, OpCounts
from tests.support.experts import FLAT as EXPERT_MESH
from tests.support.experts import arguments, build_with_experts, expert_mesh, experts_of, place
from tests.support.on_ranks import of_ranks, on_ranks, refusal
from tests.support.worker_pool import ON_DROPPED_GROUPS
from tests.support.zoo import (
    FLOORS,
    MODEL_CASES,
    Block,
    Floor,
    Tower,
    make_token_batch,
    token_case,
    token_loss,
    tower_step,
)

pytestmark = pytest.mark.unmerged

EXPERTS = token_case(build_with_experts)


@cache
def second_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """One more group of a one-dimensional mesh; every rank calls this in the same order for its part of one mesh."""
    rows = of_ranks(tuple(dist.get_process_group_ranks(mesh.get_group())))
    return dist.new_subgroups_by_enumeration([list(row) for row in dict.fromkeys(rows)])[0]


ON_DROPPED_GROUPS.append(second_group.cache_clear)


def flat() -> dict[str, Any]:
    mesh = mesh_of((dist.get_world_size(),), ("dp_shard",))
    return {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "fsdp_group_ag": second_group(mesh)}


def hybrid() -> dict[str, Any]:
    found = hybrid_arguments(2, 2)
    return {**found, "fsdp_group_ag": second_group(found["device_mesh"]["dp_shard"])}


def with_experts() -> dict[str, Any]:
    found = arguments(EXPERT_MESH)
    return {
        **found,
        "fsdp_group_ag": second_group(found["device_mesh"]),
        "expt_fsdp_group_ag": second_group(expert_mesh(EXPERT_MESH)["dp_shard"]),
    }


FLAT, HYBRID = Arrangement("flat, second group", flat), Arrangement("hybrid, second group", hybrid)
WITH_EXPERTS = Arrangement(
    "experts, second groups", with_experts, partial(place, EXPERT_MESH), whole=experts_of(EXPERT_MESH).whole
)


def test_values_do_not_change(run_ranks: RunRanks) -> None:
    odd = Scenario(two_steps, MODEL_CASES["odd_shapes"])
    check_strategies(run_ranks, 3, odd, [Setting(inner, arrangement=FLAT) for inner in (1, 3)])
    settings = [Setting(inner, outer_strategy=outer, arrangement=HYBRID) for inner, outer in ((1, 0), (3, 1))]
    check_strategies(run_ranks, 4, odd, settings)
    check_strategies(run_ranks, 4, Scenario(two_steps, EXPERTS), [Setting(3, arrangement=WITH_EXPERTS)])


@pytest.mark.parametrize(("num_ranks", "strategy", "gathers"), [(2, 1, FLOORS + 1), (4, 3, 2 * FLOORS - 1)])
@on_ranks()
def test_weights_are_gathered_on_the_second_group_only(strategy: int, gathers: int, num_ranks: int) -> None:
    """Four ranks are hybrid ones."""
    found = hybrid() if num_ranks == 4 else flat()
    group, gather_group = found["device_mesh"]["dp_shard"].get_group(), found["fsdp_group_ag"]
    assert group.group_name != gather_group.group_name
    sharded, optimizer = shard(Tower(), zero_dp_strategy=strategy, fsdp_unit_modules=[Floor], **found)
    for _ in range(2):
        with OpCounts() as counts:
            tower_step(sharded, optimizer, torch.ones(2, 16))
    assert counts.on(gather_group, GATHER)[0] == gathers
    assert counts.on(gather_group) == counts.on(gather_group, GATHER)
    assert counts.on(group, GATHER) == (0, 0)
    assert counts.on(group, EXCHANGE, ALL_REDUCE)[0] == FLOORS + 1


@on_ranks(4)
def test_experts_are_gathered_on_their_own_second_group() -> None:
    """Two blocks, each with experts, and a root without; both blocks stay gathered."""
    found = with_experts()
    model = build_with_experts()
    place(EXPERT_MESH, model)
    sharded, optimizer = shard(model, fsdp_unit_modules=[Block], **found)
    batch = make_token_batch(2, torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        with OpCounts() as counts:
            token_loss(sharded, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    groups = (found["fsdp_group_ag"], found["expt_fsdp_group_ag"], expert_mesh(EXPERT_MESH)["dp_shard"].get_group())
    # The first group of experts has two reductions, and which experts were used.
    assert [(counts.on(group, GATHER)[0], counts.on(group)[0]) for group in groups] == [(3, 3), (2, 2), (0, 3)]


@pytest.mark.parametrize("argument", ["fsdp_group_ag", "expt_fsdp_group_ag"])
@on_ranks(4)
def test_a_group_of_other_ranks_is_refused(argument: str) -> None:
    found = with_experts()
    found[argument] = mesh_of((2, 2), ("a", "b"))["a"].get_group()  # other pairs than those that share experts
    said = refusal(fully_shard_model, build_with_experts(), **found)
    assert f"{argument} is a group of 2 ranks that are not those along the mesh dimensions" in said
