"""EP 2 x FSDP 2 on a mixture of experts equals one process that holds all experts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp.describe.model import describe
from tests.conftest import RunRanks
from tests.support.arrangements import Arrangement, Values, flattened, hybrid_arguments, mesh_of
from tests.support.case import (
    Run,
    Scenario,
    Setting,
    check_strategies,
    clip_by_model,
    clip_by_torch,
    decayed_adamw,
    defer_two_of_three,
    mean_over_all_tokens,
    reference,
    shard,
    three_steps,
    train_and_accumulate,
    two_steps,
)
from tests.support.experts import (
    FLAT,
    ListedExperts,
    MixtureOfExperts,
    Sizes,
    arguments,
    build_with_experts,
    expert_mesh,
    experts_of,
    place,
)
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.zoo import Block, gappy_case, token_case

EXPERTS = experts_of(FLAT)
HYBRID_SIZES: tuple[Sizes, ...] = (
    (("dp_outer", 2), ("ep", 2), ("dp_shard", 1)),
    (("dp_outer", 2), ("ep", 1), ("dp_shard", 2)),
    (("ep", 2), ("dp_outer", 2), ("dp_shard", 1)),
    (("dp_outer", 1), ("ep", 2), ("dp_shard", 2)),
)
HYBRIDS = tuple(map(experts_of, HYBRID_SIZES))
"""In the last two the outer ranks of experts are others than those of dense parameters."""

TOP1 = token_case(build_with_experts)
TOP2 = token_case(partial(build_with_experts, 2))
UNEVEN = gappy_case(partial(build_with_experts, 2))


# ---- parity ----------------------------------------------------------------------------------------------------------


def test_experts_and_dense_parameters_get_the_mean_over_all_ranks(run_ranks: RunRanks) -> None:
    """A collective that averages an expert over its 2 ranks has to be corrected to the mean over 4."""
    settings = [
        Setting(inner, one_call=inner % 2 == 0, average_in_collective=inner > 1, arrangement=EXPERTS)
        for inner in range(4)
    ]
    check_strategies(run_ranks, 4, Scenario(two_steps, TOP2), settings)


@pytest.mark.full(short=["arrangement2"])
@pytest.mark.parametrize("arrangement", HYBRIDS)
def test_hybrid_sharding_with_experts_equals_one_process(run_ranks: RunRanks, arrangement: Arrangement) -> None:
    """Experts are reduced over their own outer group, not that of dense parameters."""
    settings = [
        Setting(1, arrangement=arrangement),
        Setting(3, average_in_collective=True, outer_strategy=1, arrangement=arrangement),
    ]
    check_strategies(run_ranks, 4, Scenario(defer_two_of_three, TOP2), settings)


def arguments_as_printed() -> dict[str, Any]:
    """The meshes of the published documentation: experts have neither the outer dimension nor the flattened one."""
    dense = mesh_of((2, 2, 1, 1), ("dp_outer", "dp_shard", "cp", "tp"))
    flattened(dense, ("dp_shard", "cp"), "dp_shard_cp")
    group = flattened(dense, ("dp_outer", "dp_shard", "cp"), "hsdp").get_group()
    return {
        "device_mesh": dense,
        "dp_shard_dim": "dp_shard_cp",
        "dp_outer_dim": "dp_outer",
        "tp_dim": "tp",
        "hybrid_fsdp_group": group,
        "expt_device_mesh": mesh_of((4, 1), ("dp_shard", "tp")),
    }


def arguments_without_group(sizes: Sizes) -> dict[str, Any]:
    return {**hybrid_arguments(2, 2), "expt_device_mesh": expert_mesh(sizes)}


LEFT_OUT = (
    Arrangement("as printed", arguments_as_printed),
    replace(HYBRIDS[0], name="no group", arguments=partial(arguments_without_group, HYBRID_SIZES[0])),
)


@pytest.mark.full(short=["as printed"])
@pytest.mark.parametrize("arrangement", LEFT_OUT, ids=[found.name for found in LEFT_OUT])
def test_what_the_expert_mesh_leaves_out_is_completed(run_ranks: RunRanks, arrangement: Arrangement) -> None:
    check_strategies(run_ranks, 4, Scenario(two_steps, TOP2), [Setting(3, outer_strategy=1, arrangement=arrangement)])


def test_per_token_losses_are_summed_without_a_factor(run_ranks: RunRanks) -> None:
    settings = [Setting(1, per_token=True, arrangement=EXPERTS), Setting(3, per_token=True, arrangement=HYBRIDS[3])]
    check_strategies(run_ranks, 4, Scenario(mean_over_all_tokens, UNEVEN), settings)


@pytest.mark.full(short=["clip_by_model"])
@pytest.mark.parametrize("script", [clip_by_model, clip_by_torch])
def test_the_norm_is_that_of_dense_parameters_and_all_experts(
    run_ranks: RunRanks, script: Callable[[Run], None]
) -> None:
    settings = [Setting(0, arrangement=EXPERTS), Setting(3, outer_strategy=1, arrangement=HYBRIDS[2])]
    check_strategies(run_ranks, 4, Scenario(script, TOP1), settings)


def build_listed() -> nn.Module:
    """The last of four experts is never chosen; the others may be without tokens on some ranks."""
    model = build_with_experts(kind=ListedExperts)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.closed = 1
    return model


def whole_list(values: Values) -> Values:
    """Number each rank's experts on from those of the rank before."""
    group = expert_mesh(FLAT)["ep"].get_group()
    mine = {name: value for name, value in values.items() if ".experts." in name}
    by_rank: list[dict[str, torch.Tensor | None]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(by_rank, mine, group=group)
    found = {name: value for name, value in values.items() if name not in mine}
    for rank, theirs in enumerate(by_rank):
        for name, value in theirs.items():
            before, after = name.split(".experts.")
            local, rest = after.split(".", 1)
            found[f"{before}.experts.{2 * rank + int(local)}.{rest}"] = value
    return found


LISTED = token_case(build_listed)
AS_LIST = Arrangement("listed experts", EXPERTS.arguments, EXPERTS.place, whole=whole_list)


def test_an_expert_without_tokens_anywhere_has_no_gradient_and_is_left_alone(run_ranks: RunRanks) -> None:
    """Its namesake on the other ranks, which is another expert, is trained."""
    expected = reference(Scenario(train_and_accumulate, LISTED, decayed_adamw)).notes[0][1]
    unused = {name for name, value in expected.items() if value is None}
    assert unused == {f"blocks.{block}.mlp.experts.3.{part}" for block in (0, 1) for part in PARTS}
    settings = [Setting(inner, arrangement=AS_LIST) for inner in (1, 3)]
    check_strategies(run_ranks, 4, Scenario(train_and_accumulate, LISTED, decayed_adamw), settings)


PARTS = ("0.weight", "0.bias", "2.weight", "2.bias")


# ---- which parameters are experts ------------------------------------------------------------------------------------


def mark(model: nn.Module) -> None:
    """As Megatron's layers mark their experts."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            for param in module.get_submodule(module.experts_name).parameters():
                param.allreduce = False


def place_marked(model: nn.Module) -> None:
    place(FLAT, model)
    mark(model)


SPECIALISTS = token_case(partial(build_with_experts, 2, name="specialists"))


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
    message = refusal(fully_shard_model, build_experts(is_marked=True), mesh, "dp_shard")
    for part in ("blocks.0.mlp.experts.", "allreduce=False", "expt_device_mesh"):
        assert part in message
    sharded = fully_shard_model(build_experts(), mesh, "dp_shard")
    assert sharded.module.get_parameter("blocks.0.mlp.experts.up").device_mesh.size() == 2


# ---- a strategy of experts alone -------------------------------------------------------------------------------------


def of_experts(inner: int, experts: int, **others: Any) -> Setting:
    return Setting(inner, options=(("zero_dp_strategy_experts", experts),), **others)


def test_experts_of_another_strategy_train_as_one_process_does(run_ranks: RunRanks) -> None:
    settings = [
        of_experts(1, 3, arrangement=EXPERTS),
        of_experts(3, 0, arrangement=EXPERTS, one_call=False),
        of_experts(2, 1, arrangement=HYBRIDS[2]),
        of_experts(2, 3, arrangement=HYBRIDS[0], outer_strategy=1, average_in_collective=True),
        of_experts(0, 3),  # experts on the ranks of all else, as with ep_size=1
    ]
    check_strategies(run_ranks, 4, Scenario(defer_two_of_three, TOP2), settings)


@on_ranks(2)
def test_groups_of_one_unit_send_as_their_own_strategies_do() -> None:
    """What stays whole is gathered and reduced once a step, also beside what is so in each of three microbatches."""
    sizes: Sizes = (("ep", 1), ("dp_shard", 2))
    sent = {}
    for inner, experts in product((1, 3), (1, 3)):
        model, optimizer = shard(
            TOP2,
            zero_dp_strategy=inner,
            zero_dp_strategy_experts=experts,
            sync_model_each_microbatch=False,
            **({"max_gathered_units": 1} if 3 in (inner, experts) else {}),  # so that backward gathers again
            **arguments(sizes),
        )
        assert describe(model).strategy == ", ".join(dict.fromkeys((NAMES[inner], NAMES[experts])))
        for index in (0, 1, 2) * 2:
            model.is_last_microbatch = index == 2
            batch = TOP2.make_batch(4, torch.Generator().manual_seed(index))
            TOP2.loss(model, batch).backward()
            if index == 2:
                optimizer.step()
                optimizer.zero_grad()
        sent[inner, experts] = model._engine.traffic
    assert sent[1, 3].plus(sent[3, 1]) == sent[1, 1].plus(sent[3, 3])
    assert sent[1, 1].gather_bytes < sent[1, 3].gather_bytes < sent[3, 3].gather_bytes
    assert sent[1, 1].reduce_bytes < sent[1, 3].reduce_bytes < sent[3, 3].reduce_bytes


NAMES = {1: "optim", 3: "optim_grads_params"}


@on_ranks(2)
def test_a_strategy_of_experts_is_refused_where_it_cannot_hold() -> None:
    mesh = {"device_mesh": mesh_of((2,), ("dp_shard",))}
    message = refusal(fully_shard_model, build_experts(), zero_dp_strategy_experts="zero3", **mesh)
    assert message.startswith("zero_dp_strategy_experts='zero3' is not a sharding strategy; give one of 0 or")
    policy = MixedPrecisionPolicy(weight_format="fp8")
    message = refusal(
        fully_shard_model, build_experts(), zero_dp_strategy_experts=1, mixed_precision_policy=policy, **mesh
    )
    assert "strategy optim keeps them whole" in message
    message = refusal(fully_shard_model, build_experts(name="specialists"), zero_dp_strategy_experts=1, **mesh)
    assert message.startswith("zero_dp_strategy_experts=optim has no effect, since no parameter has '.experts.'")
