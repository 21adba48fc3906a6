"""The three strategy configs: fields as published, what is refused, and sizes that multiply to the world."""

import dataclasses
import math
import typing
import warnings
from typing import Any, List, Optional  # noqa: UP035 (the published annotations)

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from megatron_fsdp.automodel.config import (
    SIZE_NAMES,
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    check_config,
    resolve_sizes,
)
from megatron_fsdp.automodel.multimodal import MultimodalDistributedConfig
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, ParallelSizeError

# ruff: noqa: UP006, UP045

FSDP2_FIELDS: dict[str, tuple[Any, Any]] = {
    "sequence_parallel": (bool, False),
    "tp_plan": (Optional[dict], None),
    "patch_is_packed_sequence": (bool, False),
    "mp_policy": (Optional[MixedPrecisionPolicy], None),
    "offload_policy": (Optional[CPUOffloadPolicy], None),
    "autocast_dtype": (Optional[torch.dtype], None),
    "activation_checkpointing": (bool | str, False),
    "defer_fsdp_grad_sync": (bool, True),
    "backend": (str, "nccl"),
    "enable_async_tensor_parallel": (bool, False),
    "enable_compile": (bool, False),
    "enable_fsdp2_prefetch": (bool, False),
    "fsdp2_backward_prefetch_depth": (int, 2),
    "fsdp2_forward_prefetch_depth": (int, 1),
    "reshard_after_forward": (Optional[bool], None),
    "activation_checkpointing_scope": (Any, ("all",)),
    "multimodal": (MultimodalDistributedConfig, MultimodalDistributedConfig()),
    "ulysses_degree": (int, 1),  # of this package only
}
MEGATRON_FIELDS: dict[str, tuple[Any, Any]] = {
    "sequence_parallel": (bool, False),
    "megatron_fsdp_unit_modules": (Optional[List[str]], None),
    "zero_dp_strategy": (int, 3),
    "init_fsdp_with_meta_device": (bool, False),
    "grad_reduce_in_fp32": (bool, False),
    "preserve_fp32_weights": (bool, False),
    "overlap_grad_reduce": (bool, True),
    "overlap_param_gather": (bool, True),
    "check_for_nan_in_grad": (bool, True),
    "average_in_collective": (bool, False),
    "disable_bucketing": (bool, False),
    "calculate_per_token_loss": (bool, False),
    "keep_fp8_transpose_cache": (bool, False),
    "nccl_ub": (bool, False),
    "fsdp_double_buffer": (bool, False),
    "activation_checkpointing": (bool | str, False),
    "backend": (str, "nccl"),
    "deterministic": (Optional[str], None),  # of this package only
    "offload": (Any, None),  # of this package only
    "weight_format": (Any, None),  # of this package only
    "report_nan_in_param_grad": (bool, False),
    "ulysses_degree": (int, 1),
    "zero_dp_strategy_experts": (Optional[int], None),
}
DDP_FIELDS: dict[str, tuple[Any, Any]] = {
    "activation_checkpointing": (bool | str, False),
    "backend": (str, "nccl"),
    "find_unused_parameters": (bool, False),
    "static_graph": (bool, False),
    "bucket_cap_mb": (Optional[float], None),
    "broadcast_buffers": (bool, False),
    "gradient_as_bucket_view": (bool, False),
    "autocast_dtype": (Optional[torch.dtype], None),
    "activation_checkpointing_scope": (Any, ("all",)),
}

PUBLISHED = [(FSDP2Config, FSDP2_FIELDS), (MegatronFSDPConfig, MEGATRON_FIELDS), (DDPConfig, DDP_FIELDS)]
ALL = [FSDP2Config, MegatronFSDPConfig, DDPConfig]


def field_type(kind: type, name: str) -> Any:
    return typing.get_type_hints(kind)[name]


@pytest.mark.parametrize(("kind", "published"), PUBLISHED)
def test_fields_and_their_dictionary_have_the_published_names_order_types_and_defaults(
    kind: Any, published: Any
) -> None:
    fields = dataclasses.fields(kind)
    assert [field.name for field in fields] == list(published)
    assert {field.name: field_type(kind, field.name) for field in fields} == {
        name: hint for name, (hint, _) in published.items()
    }
    assert typing.get_type_hints(kind.to_dict)["return"] == dict[str, Any]
    expected = {name: default for name, (_, default) in published.items()}
    if kind is FSDP2Config:
        expected["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16, True)
    assert list(kind().to_dict().items()) == list(expected.items())


@pytest.mark.parametrize("kind", [FSDP2Config, DDPConfig])
def test_what_torch_reduces_cannot_be_deterministic(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="order of the back end; use MegatronFSDPConfig"):
        kind(deterministic="world")


def test_asynchronous_tensor_parallelism_switches_sequence_parallelism_on_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"enable_async_tensor_parallel needs sequence_parallel=True") as caught:
        config = FSDP2Config(enable_async_tensor_parallel=True)
    assert config.sequence_parallel is True
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP2Config(enable_async_tensor_parallel=True, sequence_parallel=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, published in PUBLISHED for name, (hint, _) in published.items() if hint is bool],
)
@pytest.mark.parametrize("value", ["false", 1, None])
def test_flag_that_is_no_boolean_is_refused(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{kind.__name__}\.{name}={value!r}; give True or False$"):
        kind(**{name: value})


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("backend", ["mpi", "NCCL", None, 1, [], "cpu:gloo,cuda:nccl"])
def test_backend_is_nccl_or_gloo(kind: Any, backend: Any) -> None:
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
        with pytest.raises(ConfigurationError, match=wanted) as caught:
            kind(**{name: value})
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_each_of_the_three_passes_and_nothing_else() -> None:
    for kind in ALL:
        config = kind()
        assert check_config(config) is config
    for other in (None, {}, "fsdp2", MixedPrecisionPolicy()):
        with pytest.raises(ConfigurationError, match=rf"config is {type(other).__name__}; give an FSDP2Config"):
            check_config(other)
    with pytest.raises(ConfigurationError, match=r"distributed_config is DDPConfig \(the class\)"):
        check_config(DDPConfig)


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
@pytest.mark.parametrize("size", [-2, True, False, 2.0, "2", "none", [2], 0, -1])
def test_size_that_is_no_positive_whole_number_is_refused(name: str, size: Any) -> None:
    if name == "dp_size" and type(size) is int and size in (0, -1):
        return  # inferred
    with pytest.raises(
        ParallelSizeError, match=rf"^{name}=.*give a whole number of ranks, 1 or more, or leave it out$"
    ):
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
        with pytest.raises(ParallelSizeError):
            resolve_sizes(config, world, **asked)
        return
    sizes = resolve_sizes(config, world, **asked)
    assert world == math.prod((sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp, sizes.pp))
    assert sizes.ep * sizes.ep_shard * sizes.pp == world
    assert (sizes.tp, sizes.pp, sizes.cp, sizes.ep) == tuple(
        number[f"{axis}_size"] for axis in ("tp", "pp", "cp", "ep")
    )
    assert (sizes.dp, sizes.dp_replicate) == (dp, copies)
