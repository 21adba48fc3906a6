"""The three strategy configs: their fields as published, and what is refused."""

import dataclasses
import typing
import warnings
from typing import Any, List, Optional  # noqa: UP035 (the published annotations)

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from megatron_fsdp.automodel.config import DDPConfig, DistributedConfig, FSDP2Config, MegatronFSDPConfig, check_config
from megatron_fsdp.errors import ConfigurationError

# ruff: noqa: UP006, UP045

FSDP2_FIELDS: dict[str, tuple[Any, Any]] = {
    "sequence_parallel": (bool, False),
    "tp_plan": (Optional[dict], None),
    "patch_is_packed_sequence": (bool, False),
    "mp_policy": (Optional[MixedPrecisionPolicy], None),
    "offload_policy": (Optional[CPUOffloadPolicy], None),
    "autocast_dtype": (Optional[torch.dtype], None),
    "activation_checkpointing": (bool, False),
    "defer_fsdp_grad_sync": (bool, True),
    "backend": (str, "nccl"),
    "enable_async_tensor_parallel": (bool, False),
    "enable_compile": (bool, False),
    "enable_fsdp2_prefetch": (bool, False),
    "fsdp2_backward_prefetch_depth": (int, 2),
    "fsdp2_forward_prefetch_depth": (int, 1),
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
    "activation_checkpointing": (bool, False),
    "backend": (str, "nccl"),
}
DDP_FIELDS: dict[str, tuple[Any, Any]] = {"activation_checkpointing": (bool, False), "backend": (str, "nccl")}

PUBLISHED = [(FSDP2Config, FSDP2_FIELDS), (MegatronFSDPConfig, MEGATRON_FIELDS), (DDPConfig, DDP_FIELDS)]
ALL = [FSDP2Config, MegatronFSDPConfig, DDPConfig]


def field_type(kind: type, name: str) -> Any:
    return typing.get_type_hints(kind)[name]


@pytest.mark.parametrize(("kind", "published"), PUBLISHED)
def test_fields_have_the_published_names_order_types_and_defaults(kind: Any, published: Any) -> None:
    fields = dataclasses.fields(kind)
    assert [field.name for field in fields] == list(published)
    assert {field.name: (field_type(kind, field.name), field.default) for field in fields} == published
    assert typing.get_type_hints(kind.to_dict)["return"] == dict[str, Any]


def test_order_of_arguments_is_that_of_the_published_fields() -> None:
    assert FSDP2Config(True, {"a": "colwise"}, True).patch_is_packed_sequence is True
    config = MegatronFSDPConfig(False, None, ["a.B"], 2)  # the second one is tp_plan
    assert (config.megatron_fsdp_unit_modules, config.zero_dp_strategy) == (["a.B"], 2)
    assert DDPConfig(True, "gloo").backend == "gloo"


def test_any_of_the_three_is_a_distributed_config() -> None:
    assert set(typing.get_args(DistributedConfig)) == set(ALL)


@pytest.mark.parametrize(("kind", "published"), PUBLISHED)
def test_dictionary_has_every_field_in_order(kind: Any, published: Any) -> None:
    made = kind().to_dict()
    assert list(made) == list(published)
    expected = {name: default for name, (_, default) in published.items()}
    if kind is FSDP2Config:
        expected["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16, True)
    assert made == expected


def test_dictionary_holds_the_same_objects_and_no_copies() -> None:
    plan: dict[str, Any] = {"layers.*": object()}
    policy, offload = MixedPrecisionPolicy(), CPUOffloadPolicy(pin_memory=False)
    made = FSDP2Config(tp_plan=plan, mp_policy=policy, offload_policy=offload).to_dict()
    assert made["tp_plan"] is plan
    assert made["mp_policy"] is policy
    assert made["offload_policy"] is offload
    units = ["a.B"]
    assert MegatronFSDPConfig(megatron_fsdp_unit_modules=units).to_dict()["megatron_fsdp_unit_modules"] is units


def test_dictionary_can_be_changed_without_changing_the_config() -> None:
    config = DDPConfig()
    config.to_dict()["backend"] = "gloo"
    assert config.backend == "nccl"


@pytest.mark.parametrize("kind", ALL)
def test_dictionary_makes_an_equal_config(kind: Any) -> None:
    config = kind(activation_checkpointing=True, backend="gloo")
    assert kind(**config.to_dict()) == config
    assert config != kind()


@pytest.mark.parametrize("kind", ALL)
def test_replace_gives_a_changed_copy(kind: Any) -> None:
    config = kind()
    changed = dataclasses.replace(config, backend="gloo")
    assert (config.backend, changed.backend) == ("nccl", "gloo")
    assert dataclasses.replace(changed, backend="nccl") == config


def test_replace_checks_again() -> None:
    with pytest.raises(ConfigurationError, match=r"backend='mpi'"):
        dataclasses.replace(DDPConfig(), backend="mpi")
    with pytest.raises(ConfigurationError, match=r"tp_plan"):
        dataclasses.replace(MegatronFSDPConfig(), tp_plan={})


def test_default_policy_is_not_shared_and_one_that_is_given_is_kept() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    assert FSDP2Config(mp_policy=policy).mp_policy is policy
    assert FSDP2Config(mp_policy=MixedPrecisionPolicy()).mp_policy == MixedPrecisionPolicy()


@pytest.mark.parametrize("plan", [{}, {"layers.*": "colwise"}, "some.path"])
def test_megatron_takes_no_plan_of_ones_own_not_even_an_empty_one(plan: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"MegatronFSDPConfig takes no tp_plan.*FSDP2Config"):
        MegatronFSDPConfig(tp_plan=plan)


def test_plan_of_megatron_reads_as_none_and_is_no_field() -> None:
    config = MegatronFSDPConfig(tp_plan=None)
    assert config.tp_plan is None
    assert "tp_plan" not in config.to_dict()


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


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("mp_policy", {"param_dtype": "bfloat16"}, "MixedPrecisionPolicy"),
        ("mp_policy", MixedPrecisionPolicy, "MixedPrecisionPolicy"),
        ("offload_policy", True, "CPUOffloadPolicy"),
        ("autocast_dtype", "bfloat16", "dtype"),
        ("tp_plan", ["colwise"], "dict"),
        ("fsdp2_backward_prefetch_depth", -1, "0 or more"),
        ("fsdp2_forward_prefetch_depth", 1.0, "whole number"),
        ("fsdp2_forward_prefetch_depth", True, "whole number"),
        ("fsdp2_backward_prefetch_depth", None, "whole number"),
    ],
)
def test_fsdp2_value_of_another_type_is_refused(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s)^FSDP2Config.{name}.*{wanted}") as caught:
        FSDP2Config(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", [4, -1, True, None, 3.0, "zero3"])
def test_sharding_strategy_is_one_of_four(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"zero_dp_strategy="):
        MegatronFSDPConfig(zero_dp_strategy=strategy)


@pytest.mark.parametrize("units", ["a.B", {"a.B"}, 3, [3], [""], [None]])
def test_unit_modules_are_a_list_of_paths_or_classes(units: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"MegatronFSDPConfig.megatron_fsdp_unit_modules=.*give a list"):
        MegatronFSDPConfig(megatron_fsdp_unit_modules=units)


def test_unit_modules_may_be_classes() -> None:
    units: Any = [torch.nn.Linear, "torch.nn.Embedding"]
    assert MegatronFSDPConfig(megatron_fsdp_unit_modules=units).megatron_fsdp_unit_modules == units


@pytest.mark.parametrize("config", [None, {}, "fsdp2", MixedPrecisionPolicy()])
def test_what_is_none_of_the_three_is_refused(config: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"distributed_config is {type(config).__name__}; give an FSDP2Config"
    ):
        check_config(config)


def test_class_in_place_of_its_object_is_refused_in_these_words() -> None:
    with pytest.raises(ConfigurationError, match=r"distributed_config is DDPConfig \(the class\)"):
        check_config(DDPConfig)


@pytest.mark.parametrize("kind", ALL)
def test_each_of_the_three_passes(kind: Any) -> None:
    config = kind()
    assert check_config(config) is config
