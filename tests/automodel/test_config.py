"""The three strategy configs: fields as published, what is refused, and sizes that multiply to the world."""

import dataclasses
import math
import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_fsdp.automodel.config import (
    SIZE_NAMES,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    check_config,
    resolve_sizes,
)
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, ParallelSizeError
from tests.support.on_ranks import refusal

PUBLISHED = {
    FSDP2Config: "sequence_parallel tp_plan patch_is_packed_sequence mp_policy offload_policy autocast_dtype "
    "activation_checkpointing defer_fsdp_grad_sync backend enable_async_tensor_parallel enable_compile "
    "enable_fsdp2_prefetch fsdp2_backward_prefetch_depth fsdp2_forward_prefetch_depth reshard_after_forward "
    "activation_checkpointing_scope multimodal ulysses_degree",
    MegatronFSDPConfig: "sequence_parallel megatron_fsdp_unit_modules zero_dp_strategy init_fsdp_with_meta_device "
    "grad_reduce_in_fp32 preserve_fp32_weights overlap_grad_reduce overlap_param_gather check_for_nan_in_grad "
    "average_in_collective disable_bucketing calculate_per_token_loss keep_fp8_transpose_cache nccl_ub "
    "fsdp_double_buffer activation_checkpointing backend deterministic offload weight_format report_nan_in_param_grad "
    "ulysses_degree zero_dp_strategy_experts",
    DDPConfig: "activation_checkpointing backend find_unused_parameters static_graph bucket_cap_mb broadcast_buffers "
    "gradient_as_bucket_view autocast_dtype activation_checkpointing_scope",
}
"""Fields in their order, which clients may rely on."""
ALL = list(PUBLISHED)
FLAGS = [(kind, field.name) for kind in ALL for field in dataclasses.fields(kind) if field.type == "bool"]


def test_fields_and_their_dictionary_have_the_published_order() -> None:
    for kind, names in PUBLISHED.items():
        assert [field.name for field in dataclasses.fields(kind)] == list(kind().to_dict()) == names.split()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16, True)
    assert FSDP2Config().to_dict()["mp_policy"] == policy


@pytest.mark.parametrize("kind", [FSDP2Config, DDPConfig])
def test_what_torch_reduces_cannot_be_deterministic(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="order of the back end; use MegatronFSDPConfig"):
        kind(deterministic="world")


def test_async_tensor_parallelism_without_sequences_cut_and_prefetching_of_nothing_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"enable_async_tensor_parallel needs sequence_parallel=True") as caught:
        config = FSDP2Config(enable_async_tensor_parallel=True)
    assert config.sequence_parallel is True
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"enable_fsdp2_prefetch has no effect with both prefetch depths 0"):
        FSDP2Config(enable_fsdp2_prefetch=True, fsdp2_backward_prefetch_depth=0, fsdp2_forward_prefetch_depth=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP2Config(enable_async_tensor_parallel=True, sequence_parallel=True)
        FSDP2Config(enable_fsdp2_prefetch=True, fsdp2_backward_prefetch_depth=0)


def test_flags_that_are_no_booleans_are_refused() -> None:
    assert len(FLAGS) > 20
    for kind, name in FLAGS:
        for value in ("false", 1, None):
            told = refusal(kind, error=ConfigurationError, **{name: value})
            assert told == f"{kind.__name__}.{name}={value!r}; give True or False"


@pytest.mark.parametrize("kind", ALL)
def test_backend_is_nccl_or_gloo(kind: Any) -> None:
    for backend in ("mpi", "NCCL", None, 1, [], "cpu:gloo,cuda:nccl"):
        with pytest.raises(ConfigurationError, match=rf"^{kind.__name__}\.backend=.*'nccl'.*'gloo'"):
            kind(backend=backend)


UNITS = "MegatronFSDPConfig.megatron_fsdp_unit_modules=.*give a list"
PARTS = "give True, False, 'full' or 'selective'"


@pytest.mark.parametrize(
    ("kind", "name", "values", "wanted"),
    [
        (FSDP2Config, "mp_policy", [{"param_dtype": "bfloat16"}, MixedPrecisionPolicy], "MixedPrecisionPolicy"),
        (FSDP2Config, "offload_policy", [True], "CPUOffloadPolicy"),
        (FSDP2Config, "autocast_dtype", ["bfloat16"], "dtype"),
        (FSDP2Config, "tp_plan", [["colwise"]], "dict"),
        (FSDP2Config, "fsdp2_backward_prefetch_depth", [-1, None], "whole number of layers, 0 or more"),
        (FSDP2Config, "fsdp2_forward_prefetch_depth", [1.0, True], "whole number of layers, 0 or more"),
        (MegatronFSDPConfig, "zero_dp_strategy", [4, -1, True, None, 3.0, "zero3"], "zero_dp_strategy="),
        (MegatronFSDPConfig, "zero_dp_strategy_experts", [4, True, "zero3"], "zero_dp_strategy_experts="),
        (MegatronFSDPConfig, "megatron_fsdp_unit_modules", ["a.B", {"a.B"}, 3, [3], [""], [None]], UNITS),
        (MegatronFSDPConfig, "activation_checkpointing", [None], PARTS),
        (DDPConfig, "activation_checkpointing", ["some"], PARTS),
        (DDPConfig, "bucket_cap_mb", [0, -1.5, True, "25"], "give MiB, more than 0, or None"),
    ],
)
def test_value_of_another_type_or_range_is_refused(kind: Any, name: str, values: list[Any], wanted: str) -> None:
    for value in values:
        told = refusal(kind, error=ConfigurationError, **{name: value})
        assert re.search(wanted, told)
        assert name in told
        assert "\n" not in told


def test_each_of_the_three_passes_and_nothing_else() -> None:
    for kind in ALL:
        config = kind()
        assert check_config(config) is config
    for other in (None, {}, "fsdp2", MixedPrecisionPolicy()):
        with pytest.raises(ConfigurationError, match=rf"config is {type(other).__name__}; give an FSDP2Config"):
            check_config(other)
    assert "distributed_config is DDPConfig (the class)" in refusal(check_config, DDPConfig, error=ConfigurationError)


# ---- sizes -----------------------------------------------------------------------------------------------------------

FSDP2, MEGATRON, DDP = FSDP2Config(), MegatronFSDPConfig(), DDPConfig()
STRATEGIES = [FSDP2, MEGATRON, DDP]


PRODUCT = "^dp_size x tp_size x pp_size x cp_size = "
OTHER = r"FSDP2Config or MegatronFSDPConfig; DDPConfig takes dp_size, so leave {} out"


@pytest.mark.parametrize(
    ("config", "world", "asked", "message"),
    [
        (MEGATRON, 2, {"pp_size": 2}, "^pp_size=2 is only supported with FSDP2Config; MegatronFSDPConfig takes dp_"),
        (DDP, 2, {"tp_size": 2}, "^tp_size=2 is only supported with " + OTHER.format("tp_size")),
        (MEGATRON, 4, {"ep_size": 3}, "^dp_size x cp_size x tp_size = 4 x 1 x 1 = 4 cannot be divided by ep_size=3"),
        (
            FSDP2,
            8,
            {"tp_size": 2, "cp_size": 3},
            r"^world_size=8 cannot be divided by tp_size x pp_size x cp_size = 2 x 1 x 3 = 6; change a size or",
        ),
        (FSDP2, 8, {"dp_size": 3, "tp_size": 2}, PRODUCT + "3 x 2 x 1 x 1 = 6, but world_size is 8; leave dp_size"),
        (FSDP2, 6, {"dp_replicate_size": 4}, r"^dp_size=6 cannot be divided by dp_replicate_size=4.*multiple"),
        (
            FSDP2,
            8,
            {"dp_replicate_size": 4, "tp_size": 2},
            r"^dp_replicate_size=4 must be less than dp_size=4.*DDPConfig",
        ),
        (
            FSDP2,
            8,
            {"tp_size": 2, "pp_size": 2, "ep_size": 8},
            "^dp_size x cp_size x tp_size = 2 x 1 x 2 = 4 cannot be divided by ep_size=8",
        ),
        (FSDP2, 0, {}, "^world_size=0; give the number of ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_arithmetic(
    config: Any, world: int, asked: Any, message: str
) -> None:
    with pytest.raises(ParallelSizeError, match=message) as caught:
        resolve_sizes(config, world, **asked)
    for kind in (ValueError, AssertionError, MegatronFSDPError, ConfigurationError):
        assert isinstance(caught.value, kind)


@pytest.mark.parametrize("name", SIZE_NAMES)
def test_size_that_is_no_positive_whole_number_is_refused(name: str) -> None:
    inferred = (0, -1) if name == "dp_size" else ()
    for size in (-2, True, 2.0, "2", "none", [2], 0, -1):
        if type(size) is int and size in inferred:
            continue
        with pytest.raises(ParallelSizeError, match=rf"^{name}=.*give a whole number of ranks, 1 or more, or leave"):
            resolve_sizes(FSDP2, 4, **{name: size})


SIZES = st.sampled_from([None, 1, 2, 3, 4])


@given(
    config=st.sampled_from(STRATEGIES),
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
        refusal(resolve_sizes, config, world, error=ParallelSizeError, **asked)
        return
    sizes = resolve_sizes(config, world, **asked)
    assert world == math.prod((sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp, sizes.pp))
    assert sizes.ep * sizes.ep_shard * sizes.pp == world
    assert (sizes.tp, sizes.pp, sizes.cp, sizes.ep) == tuple(
        number[f"{axis}_size"] for axis in ("tp", "pp", "cp", "ep")
    )
    assert (sizes.dp, sizes.dp_replicate) == (dp, copies)
