"""From the sizes that a user gives to numbers that multiply to the world size."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.automodel.config import (
    SIZE_NAMES,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    ParallelSizes,
    resolve_sizes,
)
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, ParallelSizeError

FSDP2, MEGATRON, DDP = FSDP2Config(), MegatronFSDPConfig(), DDPConfig()
ALL = [FSDP2, MEGATRON, DDP]


class OwnConfig(FSDP2Config):
    """What a user may derive."""


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("world", [1, 6])
def test_without_sizes_all_ranks_share_out_the_data(config: Any, world: int) -> None:
    assert resolve_sizes(config, world) == ParallelSizes(dp_shard=world)


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("unknown", [None, 0, -1])
def test_data_parallel_size_is_inferred_where_it_is_not_said(config: Any, unknown: Any) -> None:
    assert resolve_sizes(config, 4, dp_size=unknown).dp == 4


@pytest.mark.parametrize("config", ALL)
def test_size_of_one_may_be_said_of_every_axis_under_every_strategy(config: Any) -> None:
    assert resolve_sizes(config, 4, **dict.fromkeys(SIZE_NAMES[1:], 1)) == ParallelSizes(dp_shard=4)
    assert resolve_sizes(config, 4, **dict.fromkeys(SIZE_NAMES)) == ParallelSizes(dp_shard=4)


def test_all_six_sizes_of_fsdp2() -> None:
    sizes = resolve_sizes(FSDP2, 96, dp_size=4, dp_replicate_size=2, tp_size=2, pp_size=3, cp_size=4, ep_size=8)
    assert sizes == ParallelSizes(dp_replicate=2, dp_shard=2, tp=2, pp=3, cp=4, ep=8)
    assert (sizes.dp, sizes.dp_cp, sizes.ep_shard, sizes.world) == (4, 16, 4, 96)


def test_expert_parallel_size_takes_no_part_in_inference() -> None:
    sizes = resolve_sizes(FSDP2, 8, tp_size=2, ep_size=8)
    assert (sizes.dp, sizes.ep_shard) == (4, 1)


def test_copies_are_counted_within_the_data_parallel_size() -> None:
    assert resolve_sizes(FSDP2, 8, dp_replicate_size=4) == ParallelSizes(dp_replicate=4, dp_shard=2)


def test_megatron_takes_data_tensor_and_context_parallel_sizes() -> None:
    assert resolve_sizes(MEGATRON, 12, dp_size=2, tp_size=2, cp_size=3) == ParallelSizes(dp_shard=2, tp=2, cp=3)
    assert resolve_sizes(MEGATRON, 12, tp_size=2, cp_size=3).dp == 2


@pytest.mark.parametrize(
    ("config", "name", "instead"),
    [
        (MEGATRON, "pp_size", "FSDP2Config;"),
        (MEGATRON, "dp_replicate_size", "FSDP2Config;"),
        (MEGATRON, "ep_size", "FSDP2Config;"),
        (DDP, "tp_size", "FSDP2Config or MegatronFSDPConfig;"),
        (DDP, "cp_size", "FSDP2Config or MegatronFSDPConfig;"),
        (DDP, "pp_size", "FSDP2Config;"),
        (DDP, "dp_replicate_size", "FSDP2Config;"),
        (DDP, "ep_size", "FSDP2Config;"),
    ],
)
def test_strategy_refuses_sizes_that_it_cannot_do_and_names_who_can(config: Any, name: str, instead: str) -> None:
    with pytest.raises(ParallelSizeError, match=rf"^{name}=2 is only supported with {instead} ") as caught:
        resolve_sizes(config, 2, **{name: 2})
    assert f"{type(config).__name__} takes dp_size" in str(caught.value)
    assert f"leave {name} out" in str(caught.value)


def test_refused_size_is_named_also_where_the_product_is_wrong_too() -> None:
    with pytest.raises(ParallelSizeError, match=r"pp_size=7 is only supported with FSDP2Config"):
        resolve_sizes(MEGATRON, 4, pp_size=7)


@pytest.mark.parametrize("kind", [ValueError, AssertionError, MegatronFSDPError, ConfigurationError])
def test_error_may_be_caught_as_any_of_the_published_types(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        resolve_sizes(MEGATRON, 2, dp_replicate_size=2)
    with pytest.raises(kind):
        resolve_sizes(FSDP2, 2, tp_size=3)


def test_world_that_cannot_be_divided_is_refused_with_the_arithmetic() -> None:
    message = r"^world_size=8 cannot be divided by tp_size x pp_size x cp_size = 2 x 1 x 3 = 6; change a size or"
    with pytest.raises(ParallelSizeError, match=message):
        resolve_sizes(FSDP2, 8, tp_size=2, cp_size=3)


@pytest.mark.parametrize(
    ("config", "world", "given_sizes", "arithmetic"),
    [
        (FSDP2, 8, {"dp_size": 3, "tp_size": 2}, "3 x 2 x 1 x 1 = 6, but world_size is 8"),
        (FSDP2, 2, {"dp_size": 1}, "1 x 1 x 1 x 1 = 1, but world_size is 2"),
        (FSDP2, 4, {"dp_size": 2, "tp_size": 2, "pp_size": 2, "cp_size": 2}, "2 x 2 x 2 x 2 = 16, but world_size is 4"),
        (MEGATRON, 4, {"dp_size": 4, "cp_size": 2}, "4 x 1 x 1 x 2 = 8, but world_size is 4"),
        (DDP, 2, {"dp_size": 5}, "5 x 1 x 1 x 1 = 5, but world_size is 2"),
    ],
)
def test_product_other_than_the_world_is_refused_with_the_arithmetic(
    config: Any, world: int, given_sizes: Any, arithmetic: str
) -> None:
    with pytest.raises(
        ParallelSizeError, match=rf"^dp_size x tp_size x pp_size x cp_size = {arithmetic}; leave dp_size"
    ):
        resolve_sizes(config, world, **given_sizes)


def test_data_parallel_size_must_be_a_multiple_of_the_copies() -> None:
    with pytest.raises(ParallelSizeError, match=r"^dp_size=6 cannot be divided by dp_replicate_size=4.*multiple"):
        resolve_sizes(FSDP2, 6, dp_replicate_size=4)


def test_as_many_copies_as_data_parallel_ranks_is_left_to_ddp() -> None:
    with pytest.raises(ParallelSizeError, match=r"^dp_replicate_size=4 must be less than dp_size=4.*DDPConfig"):
        resolve_sizes(FSDP2, 8, dp_replicate_size=4, tp_size=2)


def test_expert_parallel_ranks_must_divide_the_others() -> None:
    message = "^dp_size x cp_size x tp_size = 2 x 1 x 2 = 4 cannot be divided by ep_size=8"
    with pytest.raises(ParallelSizeError, match=message):
        resolve_sizes(FSDP2, 8, tp_size=2, pp_size=2, ep_size=8)


@pytest.mark.parametrize("name", SIZE_NAMES)
@pytest.mark.parametrize("size", [-2, True, False, 2.0, "2", "none", [2]])
def test_size_that_is_no_positive_whole_number_is_refused(name: str, size: Any) -> None:
    with pytest.raises(
        ParallelSizeError, match=rf"^{name}=.*give a whole number of ranks, 1 or more, or leave it out$"
    ):
        resolve_sizes(FSDP2, 4, **{name: size})


@pytest.mark.parametrize("name", SIZE_NAMES[1:])
@pytest.mark.parametrize("size", [0, -1])
def test_only_the_data_parallel_size_can_be_zero_or_minus_one(name: str, size: int) -> None:
    with pytest.raises(ParallelSizeError, match=rf"^{name}={size}; give a whole number"):
        resolve_sizes(FSDP2, 4, **{name: size})


def test_sizes_need_one_of_the_three_configs() -> None:
    with pytest.raises(ConfigurationError, match=r"distributed_config is dict"):
        resolve_sizes({}, 4)  # type: ignore[arg-type]


def test_derived_config_takes_the_sizes_of_the_one_it_is_derived_from() -> None:
    assert resolve_sizes(OwnConfig(), 4, pp_size=2).pp == 2


SIZES = st.sampled_from([None, 1, 2, 3, 4])


@given(
    config=st.sampled_from(ALL),
    world=st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24, 48]),
    asked=st.fixed_dictionaries({}, optional=dict.fromkeys(SIZE_NAMES, SIZES)),
)
def test_accepted_sizes_are_those_given_and_multiply_to_the_world(config: Any, world: int, asked: Any) -> None:
    number = {name: asked.get(name) or 1 for name in SIZE_NAMES}
    others = number["tp_size"] * number["pp_size"] * number["cp_size"]
    dp = asked.get("dp_size") or world // others
    copies, allowed = number["dp_replicate_size"], {FSDP2Config: 6, MegatronFSDPConfig: 3, DDPConfig: 1}[type(config)]
    order = ("dp_size", "tp_size", "cp_size", "dp_replicate_size", "pp_size", "ep_size")
    fits = (
        dp * others == world
        and dp % copies == 0
        and (copies == 1 or copies < dp)
        and (world // number["pp_size"]) % number["ep_size"] == 0
        and all(number[name] == 1 for name in order[allowed:])
    )
    if not fits:
        with pytest.raises(ParallelSizeError):
            resolve_sizes(config, world, **asked)
        return
    sizes = resolve_sizes(config, world, **asked)
    assert sizes.world == world == math.prod((sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp, sizes.pp))
    assert sizes.ep * sizes.ep_shard * sizes.pp == world
    assert (sizes.tp, sizes.pp, sizes.cp, sizes.ep) == tuple(
        number[f"{axis}_size"] for axis in ("tp", "pp", "cp", "ep")
    )
    assert (sizes.dp, sizes.dp_replicate) == (dp, copies)
