"""Which parameters are experts: by the name of their module, or by Megatron's mark; and what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.arrangements import Arrangement, mesh_of
from tests.support.case import Scenario, Setting, check_strategies, three_steps
from tests.support.experts import FLAT, MixtureOfExperts, arguments, build_with_experts, experts_of, place
from tests.support.on_ranks import fixed_seed, on_ranks, same_on_ranks
from tests.support.zoo import Block, token_case

HYBRID = (("dp_outer", 2), ("ep", 2), ("dp_shard", 1))


def build_specialists() -> nn.Module:
    return build_with_experts(top_k=2, name="specialists")


def mark(model: nn.Module) -> None:
    """As Megatron's layers mark their experts."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            for param in module.get_submodule(module.experts_name).parameters():
                param.allreduce = False


def place_marked(model: nn.Module) -> None:
    place(FLAT, model)
    mark(model)


SPECIALISTS = token_case(build_specialists)


def test_marked_parameters_of_another_name_are_experts(run_ranks: RunRanks) -> None:
    by_name = experts_of(FLAT, experts_name=".specialists.")
    marked = Arrangement("marked experts", by_name.arguments, place_marked, whole=by_name.whole)
    check_strategies(run_ranks, 4, Scenario(three_steps, SPECIALISTS), [Setting(s, arrangement=marked) for s in (0, 3)])


def build_experts(is_marked: bool = False, **options: Any) -> nn.Module:
    with fixed_seed(0):
        model = build_with_experts(**options)
    if is_marked:
        mark(model)
    return model


@pytest.mark.parametrize(("name", "is_marked"), [("experts", False), ("specialists", True)])
@on_ranks(4)
def test_experts_are_sharded_over_the_ranks_that_share_them(name: str, is_marked: bool) -> None:
    """Everything else, routers included, is sharded over all ranks."""
    model = build_experts(name=name)
    whole = model.get_parameter(f"blocks.0.mlp.{name}.up").detach().clone()
    place(FLAT, model)
    if is_marked:
        mark(model)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], **arguments(FLAT))
    ranks = {found: param.device_mesh.size() for found, param in model.named_parameters()}
    experts = {param for param in ranks if f".{name}." in param}
    assert len(experts) == 6
    assert {ranks[param] for param in experts} == {2}
    assert {ranks[param] for param in ranks.keys() - experts} == {4}
    # Ranks 0 and 1 hold the first two experts, ranks 2 and 3 the others: they are not made equal.
    assert torch.equal(sharded.full_parameters()[f"blocks.0.mlp.{name}.up"], whole.chunk(2)[dist.get_rank() // 2])


@on_ranks(2)
def test_without_an_expert_mesh_marked_parameters_are_refused_and_others_are_like_the_rest() -> None:
    """The whole mixture on every rank is plain data parallelism."""
    mesh = mesh_of((dist.get_world_size(),), ("dp_shard",))
    with pytest.raises(ConfigurationError) as raised:
        fully_shard_model(build_experts(is_marked=True), mesh, "dp_shard")
    message = same_on_ranks(str(raised.value))
    for part in ("blocks.0.mlp.experts.", "allreduce=False", "expt_device_mesh"):
        assert part in message
    sharded = fully_shard_model(build_experts(), mesh, "dp_shard")
    assert sharded.module.get_parameter("blocks.0.mlp.experts.up").device_mesh.size() == 2


REFUSED: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {
    "the group of experts without their mesh": (
        {"expt_device_mesh": None},
        True,
        ("hybrid_fsdp_expt_group", "expt_device_mesh"),
    ),
    "a dimension that the expert mesh lacks": ({"dp_shard_dim": "ep"}, False, ("dp_shard_dim='ep'",)),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(4)
def test_half_of_what_experts_need_is_refused_on_every_rank(case: str) -> None:
    changes, hybrid, parts = REFUSED[case]
    with pytest.raises(ConfigurationError) as raised:
        fully_shard_model(build_with_experts(), **(arguments(HYBRID if hybrid else FLAT) | changes))
    message = same_on_ranks(str(raised.value))
    for part in parts:
        assert part in message
