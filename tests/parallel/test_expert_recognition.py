"""Which parameters are experts: by the name of their module, or by Megatron's mark; and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard_model
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.arrangements import Arrangement, mesh_of
from tests.support.expert_meshes import FLAT, arguments, experts_of, place
from tests.support.mixture import MixtureOfExperts
from tests.support.models import ModelCase
from tests.support.parallel_transformer import ParallelBlock, build_with_experts, make_tokens, mean_loss
from tests.support.parity import fixed_seed
from tests.support.sharded_run import Run, Scenario, Setting, check_strategies

HYBRID = (("dp_outer", 2), ("ep", 2), ("dp_shard", 1))


def build_specialists() -> nn.Module:
    return build_with_experts(top_k=2, name="specialists")


def mark(model: nn.Module) -> None:
    """As Megatron's layers mark their experts."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            for param in module.get_submodule(module.experts_name).parameters():
                param.allreduce = False  # type: ignore[attr-defined]


def place_marked(model: nn.Module) -> None:
    place(FLAT, model)
    mark(model)


def three_steps(run: Run) -> None:
    run.train(0, 1, 2)


SPECIALISTS = ModelCase(build_specialists, make_tokens, mean_loss, (ParallelBlock,))


def test_marked_parameters_of_another_name_are_experts(run_ranks: RunRanks) -> None:
    by_name = experts_of(FLAT, experts_name=".specialists.")
    marked = Arrangement("marked experts", by_name.arguments, place_marked, whole=by_name.whole)
    check_strategies(run_ranks, 4, Scenario(three_steps, SPECIALISTS), [Setting(s, arrangement=marked) for s in (0, 3)])


def ranks_by_name(name: str, is_marked: bool) -> dict[str, int]:
    """Over how many ranks each parameter of the block is sharded."""
    with fixed_seed(0):
        model = build_with_experts(name=name)
    place(FLAT, model)
    if is_marked:
        mark(model)
    sharded = fully_shard_model(model, fsdp_unit_modules=[ParallelBlock], **arguments(FLAT))
    return {found: param.device_mesh.size() for found, param in sharded.module.named_parameters()}


@pytest.mark.parametrize(("name", "is_marked"), [("experts", False), ("experts", True), ("specialists", True)])
def test_experts_are_sharded_over_the_ranks_that_share_them(run_ranks: RunRanks, name: str, is_marked: bool) -> None:
    """Everything else, routers included, is sharded over all ranks."""
    for found in run_ranks(4, ranks_by_name, name, is_marked):
        experts = {param for param in found if f".{name}." in param}
        assert len(experts) == 6
        assert {found[param] for param in experts} == {2}
        assert {found[param] for param in found.keys() - experts} == {4}


def without_mesh(is_marked: bool) -> str | int:
    with fixed_seed(0):
        model = build_with_experts()
    if is_marked:
        mark(model)
    try:
        sharded = fully_shard_model(model, mesh_of((dist.get_world_size(),), ("dp_shard",)), "dp_shard")
    except ConfigurationError as error:
        return str(error)
    return sharded.module.get_parameter("blocks.0.mlp.experts.up").device_mesh.size()


def test_marked_parameters_without_an_expert_mesh_are_refused(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, without_mesh, True)
    assert first == second
    assert "blocks.0.mlp.experts." in first
    assert "allreduce=False" in first
    assert "expt_device_mesh" in first


def test_without_an_expert_mesh_experts_by_name_are_parameters_like_others(run_ranks: RunRanks) -> None:
    """The whole mixture on every rank is plain data parallelism."""
    assert run_ranks(2, without_mesh, False) == [2, 2]


def refuse(changes: dict[str, Any], hybrid: bool) -> str:
    sizes = HYBRID if hybrid else FLAT
    try:
        fully_shard_model(build_with_experts(), **(arguments(sizes) | changes))
    except ConfigurationError as error:
        return str(error)
    return "not refused"


REFUSED: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "the group of experts without their mesh": (
        {"expt_device_mesh": None},
        True,
        ("hybrid_fsdp_expt_group", "expt_device_mesh"),
    ),
    "a dimension that the expert mesh lacks": ({"dp_shard_dim": "ep"}, False, ("dp_shard_dim='ep'",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_half_of_what_experts_need_is_refused_on_every_rank(run_ranks: RunRanks, case: str) -> None:
    changes, hybrid, parts = REFUSED[case]
    messages = run_ranks(4, refuse, changes, hybrid)
    assert len(set(messages)) == 1
    for part in parts:
        assert part in messages[0]


def build_sharded() -> MegatronFSDP:
    with fixed_seed(0):
        model = build_with_experts()
    place(FLAT, model)
    return fully_shard_model(model, fsdp_unit_modules=[ParallelBlock], **arguments(FLAT))


def expert_weights() -> torch.Tensor:
    return build_sharded().full_parameters()["blocks.0.mlp.experts.up"]


def test_experts_of_different_ranks_are_not_made_equal(run_ranks: RunRanks) -> None:
    """Ranks 0 and 1 hold the first two experts, ranks 2 and 3 the others."""
    with fixed_seed(0):
        whole = build_with_experts().get_parameter("blocks.0.mlp.experts.up")
    for rank, found in enumerate(run_ranks(4, expert_weights)):
        assert torch.equal(found, whole.chunk(2)[rank // 2])
