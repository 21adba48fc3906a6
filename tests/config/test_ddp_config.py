"""The configuration dataclass: fields, checks, implications and the round trip through plain values."""

import copy
import dataclasses
import inspect
import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.config.ddp_config import CHOICES, EXCLUSIONS, NEEDS, ShardingStrategy, resolve_strategy
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError
from tests.support.on_ranks import refusal

# ---- every field drawn, then what cannot stand together put right ----------------------------------------------------

_COUNTS = st.integers(min_value=1, max_value=2**63 - 1)
_PATTERNS = st.one_of(
    st.sampled_from(["*norm*", "all", "-x", "--nccl-ub", "", "null", "a b", "@f", "[!a]=?"]), st.text()
)

_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: _COUNTS,
    int | None: st.none() | _COUNTS,
    tuple[str, ...]: st.lists(_PATTERNS, max_size=4).map(tuple),
    torch.dtype | None: st.sampled_from([None, torch.float16, torch.bfloat16, torch.float32, torch.float64]),
}


def _values_of(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    if field.name == "use_custom_fsdp":
        return st.just(False)  # the other value is another field's, with a warning
    if field.name == "megatron_fsdp_weight_format":
        return st.sampled_from([(), ("fp8",), ("*.head.*=none", "*=nvfp4")])
    return st.sampled_from(CHOICES[field.name]) if field.name in CHOICES else _BY_TYPE[field.type]


def _consistent(values: dict[str, Any]) -> DistributedDataParallelConfig:
    defaults = vars(DistributedDataParallelConfig())
    for rule in EXCLUSIONS:
        if values[rule.one] != defaults[rule.one] and values[rule.other] != defaults[rule.other]:
            values[rule.other] = defaults[rule.other]
    for need in NEEDS:
        if need.refused and not all(values[name] for name in need.on):
            values[need.field] = False
    return DistributedDataParallelConfig(**values)


def valid_configs() -> st.SearchStrategy[DistributedDataParallelConfig]:
    """Configurations that construction accepts."""
    fields = dataclasses.fields(DistributedDataParallelConfig)
    return st.fixed_dictionaries({field.name: _values_of(field) for field in fields}).map(_consistent)


def off(names: str) -> list[tuple[str, Any, Any]]:
    return [(name, bool, False) for name in names.split()]


FIELDS: list[tuple[str, Any, Any]] = [
    *off("grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer"),
    ("num_distributed_optimizer_instances", int, 1),
    *off("check_for_nan_in_grad check_for_large_grads"),
    ("bucket_size", int | None, None),
    ("num_buckets", int | None, None),
    *off("pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation"),
    ("param_name_patterns_for_fp32_local_accumulation", tuple[str, ...], ()),
    *off("average_in_collective fp8_param_gather fp4_param_gather reuse_grad_buf_for_mxfp8_param_ag use_megatron_fsdp"),
    ("megatron_fsdp_version", int, 1),
    ("use_custom_fsdp", bool, False),
    ("data_parallel_sharding_strategy", str, "no_shard"),
    ("gradient_reduce_div_fusion", bool, True),
    ("suggested_communication_unit_size", int | None, None),
    *off("keep_fp8_transpose_cache nccl_ub fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail"),
    ("fsdp_all_gather_in_start_param_sync", bool, True),
    ("outer_dp_sharding_strategy", str, "no_shard"),
    *off("disable_symmetric_registration fsdp_manual_registration delay_wgrad_compute"),
    ("megatron_fsdp_main_params_dtype", torch.dtype | None, torch.float32),
    ("megatron_fsdp_main_grads_dtype", torch.dtype | None, None),
    ("megatron_fsdp_grad_comm_dtype", torch.dtype | None, None),
    *off(
        "megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode "
        "megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer"
    ),
    ("megatron_fsdp_weight_format", tuple[str, ...], ()),  # of this package's class only, from here on
    ("data_parallel_sharding_strategy_experts", str | None, None),
]
"""Name, type and default of every field, in the order of the class."""


def test_fields_are_those_of_the_published_classes_and_three_more() -> None:
    found = dataclasses.fields(DistributedDataParallelConfig)
    assert [(field.name, field.type, field.default) for field in found] == FIELDS
    assert vars(DistributedDataParallelConfig()) == {name: default for name, _, default in FIELDS}


def test_every_field_is_documented() -> None:
    text = inspect.cleandoc(DistributedDataParallelConfig.__doc__ or "")
    assert [name for name, _, _ in FIELDS if f"\n    {name}: " not in text] == []


STRATEGIES = ((0, "no_shard"), (2, "optim_grads"), ("optim_grads_params",) * 2)
DTYPES = (("bf16", torch.bfloat16), ("torch.bfloat16", torch.bfloat16), ("auto", None), (torch.float16,) * 2)


def test_strategies_are_stored_by_name_and_dtypes_as_dtypes() -> None:
    cases: list[tuple[str, Any, Any]] = [("outer_dp_sharding_strategy", 1, "optim")]
    strategies = ("data_parallel_sharding_strategy", "data_parallel_sharding_strategy_experts")
    cases += [(name, *pair) for name in strategies for pair in STRATEGIES]
    cases += [(name, *pair) for name, kind, _ in FIELDS if kind == torch.dtype | None for pair in DTYPES]
    for field, value, stored in cases:
        assert getattr(DistributedDataParallelConfig(**{field: value}), field) == stored, (field, value)


PATTERNS = "param_name_patterns_for_fp32_local_accumulation"
FOUR = "give one of torch.float16, torch.bfloat16, torch.float32, torch.float64, or None to follow."
REFUSED = f"""
megatron_fsdp_version=3 does not exist; give 1 or 2.
reuse_grad_buf_for_mxfp8_param_ag=True needs fp8_param_gather=True; set both or neither.
{PATTERNS}=('all',) and grad_reduce_in_fp32=True both choose which gradients accumulate in float32; \
give only one of them.
{PATTERNS}='all' is not a tuple of strings; write a tuple such as ('*norm*',).
num_buckets=2 and bucket_size=10 both cut gradients into buckets; give only one of them.
fp8_param_gather=True and fp4_param_gather=True both choose the format in which parameters are kept and gathered; \
give only one of them.
overlap_grad_reduce='yes' is not a bool; give True or False.
megatron_fsdp_grad_comm_dtype=torch.int32 cannot be used; {FOUR}
megatron_fsdp_main_grads_dtype=32 is not a torch.dtype; {FOUR}
bucket_size=-1 is not a positive whole number; give 1 or more.
bucket_size=0 is not a positive whole number; give 1 or more.
bucket_size=True is not a positive whole number; give 1 or more.
num_distributed_optimizer_instances=None is not a positive whole number; give 1 or more.
data_parallel_sharding_strategy='zero3' is not a sharding strategy; give one of \
0 or "no_shard", 1 or "optim", 2 or "optim_grads", 3 or "optim_grads_params".
outer_dp_sharding_strategy='optim_grads' is not possible on the outer axis; give 0 or "no_shard", or 1 or "optim".
megatron_fsdp_grad_comm_dtype='bf61' is not a dtype name; give one of fp16, half, float16, bf16, bfloat16, \
fp32, float, float32, fp64, double, float64, or 'auto' or None to follow.
"""
"""Messages, which begin with the values that they refuse."""
REFUSED_OTHERWISE: list[tuple[dict[str, Any], str]] = [
    ({PATTERNS: ("*norm*", 3)}, f"{PATTERNS}[1]=3 is not a string; give a pattern such as '*norm*'."),
    ({"num_buckets": -(10**5000)}, "num_buckets is a whole number beyond 2**63 - 1 in size; give a smaller one."),
    ({"nccl_ub": 10**5000}, "nccl_ub is a whole number beyond 2**63 - 1 in size; give a smaller one."),
]


@pytest.mark.parametrize("message", REFUSED.strip().splitlines())
def test_what_is_not_possible_is_refused(message: str) -> None:
    settings = re.match(r"\w+=\S+(?: and \w+=\S+)?", message)
    assert settings is not None
    values = eval(f"dict({settings[0].replace(' and ', ', ')})", {"torch": torch})
    assert refusal(DistributedDataParallelConfig, error=ConfigurationError, **values) == message


def test_values_that_messages_do_not_show_are_refused_as_well() -> None:
    for values, message in REFUSED_OTHERWISE:
        assert refusal(DistributedDataParallelConfig, error=ConfigurationError, **values) == message


def test_what_rests_on_double_buffers_turns_them_on() -> None:
    for field in ("nccl_ub", "megatron_fsdp_max_pool_double_buffer"):
        assert DistributedDataParallelConfig(**{field: True}).fsdp_double_buffer is True


@pytest.mark.parametrize(
    "build",
    [
        lambda: DistributedDataParallelConfig(use_custom_fsdp=True),
        lambda: dataclasses.replace(DistributedDataParallelConfig(), use_custom_fsdp=True),
        lambda: DistributedDataParallelConfig.from_dict({"use_custom_fsdp": True}),
        lambda: DistributedDataParallelConfig.from_yaml("use_custom_fsdp: true"),
    ],
    ids=["class", "replace", "from_dict", "from_yaml"],
)
def test_the_former_name_of_the_engine_flag_is_mapped_with_a_warning_at_the_caller(
    build: Callable[[], DistributedDataParallelConfig],
) -> None:
    with pytest.warns(DeprecationWarning, match="use_custom_fsdp") as caught:
        config = build()
    assert (config.use_megatron_fsdp, config.use_custom_fsdp) == (True, False)
    assert [(str(warning.message), warning.filename) for warning in caught] == [
        ("use_custom_fsdp is deprecated and was taken as use_megatron_fsdp=True; write that instead.", __file__)
    ]


def test_a_checked_copy_is_in_stored_form_and_leaves_the_original_alone() -> None:
    config: Any = DistributedDataParallelConfig()
    config.data_parallel_sharding_strategy = 3
    config.megatron_fsdp_grad_comm_dtype = "bf16"
    config.param_name_patterns_for_fp32_local_accumulation = ["all"]
    config.nccl_ub = True
    before = dict(vars(config))
    found = config.checked_copy()
    assert vars(config) == before
    assert found == DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params",
        megatron_fsdp_grad_comm_dtype=torch.bfloat16,
        param_name_patterns_for_fp32_local_accumulation=("all",),
        nccl_ub=True,
        fsdp_double_buffer=True,
    )
    found.bucket_size = 3
    assert config.bucket_size is None


PERSIST = "db_use_persist_buf_on_alloc_fail"


@pytest.mark.parametrize(
    ("on", "idle"),
    [
        ("", {}),
        ("keep_fp8_transpose_cache", {"keep_fp8_transpose_cache": "fp8_param_gather=True"}),
        ("keep_fp8_transpose_cache fp8_param_gather", {}),
        ("disable_symmetric_registration", {"disable_symmetric_registration": "nccl_ub=True"}),
        ("disable_symmetric_registration nccl_ub", {}),
        ("fsdp_manual_registration", {"fsdp_manual_registration": "nccl_ub=True and use_megatron_fsdp=True"}),
        ("fsdp_manual_registration nccl_ub", {"fsdp_manual_registration": "use_megatron_fsdp=True"}),
        ("fsdp_manual_registration nccl_ub use_megatron_fsdp", {}),
        (f"fsdp_{PERSIST}", {f"fsdp_{PERSIST}": "fsdp_double_buffer=True"}),
        (f"fsdp_{PERSIST} nccl_ub", {}),
        (
            "keep_fp8_transpose_cache disable_symmetric_registration",
            {"keep_fp8_transpose_cache": "fp8_param_gather=True", "disable_symmetric_registration": "nccl_ub=True"},
        ),
    ],
)
def test_switches_without_effect_are_named_with_what_they_lack(on: str, idle: dict[str, str]) -> None:
    assert DistributedDataParallelConfig(**dict.fromkeys(on.split(), True)).idle_settings() == {
        name: f"{name}=True has no effect without {what}; set that too, or leave it out." for name, what in idle.items()
    }


@given(valid_configs())
def test_every_config_survives_all_round_trips(config: DistributedDataParallelConfig) -> None:
    known = {"DistributedDataParallelConfig": DistributedDataParallelConfig, "torch": torch}
    assert DistributedDataParallelConfig.from_dict(config.to_dict()) == config
    assert DistributedDataParallelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert DistributedDataParallelConfig.from_yaml(config.to_yaml()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert config.checked_copy() == config
    assert eval(repr(config), known) == config


NO_FIELD = "is not a field of DistributedDataParallelConfig;"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([3], "a DistributedDataParallelConfig cannot be built from a list; give a mapping of fields to values."),
        ({"overlap_grad_reduc": True}, f"'overlap_grad_reduc' {NO_FIELD} did you mean 'overlap_grad_reduce'?"),
        ({"zzz": 1}, f"'zzz' {NO_FIELD} the fields are {', '.join(name for name, _, _ in FIELDS)}."),
    ],
)
def test_a_dict_of_anything_else_is_refused(values: Any, message: str) -> None:
    assert refusal(DistributedDataParallelConfig.from_dict, values, error=ConfigurationError) == message


# ---- strategies by number and name -----------------------------------------------------------------------------------


def test_numbers_names_and_members_resolve() -> None:
    for number, name in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params")):
        strategy = ShardingStrategy[name]
        assert {resolve_strategy(given) for given in (number, name, strategy)} == {strategy}


@pytest.mark.parametrize("value", [4, "3", "mro", True, 1.0, None])
def test_anything_else_is_refused_and_both_spellings_are_listed(value: object) -> None:
    assert refusal(resolve_strategy, value, "outer_dp_sharding_strategy", error=ConfigurationError) == (
        f"outer_dp_sharding_strategy={value!r} is not a sharding strategy; give one of "
        '0 or "no_shard", 1 or "optim", 2 or "optim_grads", 3 or "optim_grads_params".'
    )


# ---- configurations in YAML files: what is read, and what is refused in words ----------------------------------------

refused = partial(refusal, DistributedDataParallelConfig.from_yaml, error=ConfigurationError)
PUT_RIGHT = "; put it right there."
TAG = f"'tag:yaml.org,2002:python/name:os.getcwd' on line 1, column 10{PUT_RIGHT}"


def test_yaml_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ddp.yaml"
    path.write_text(
        "# larger buckets\nbucket_size: 80_000_000\noverlap_grad_reduce: on\n"
        "megatron_fsdp_main_params_dtype: auto\nouter_dp_sharding_strategy: 1\n"
        "param_name_patterns_for_fp32_local_accumulation: ['*norm*']\n"
    )
    assert DistributedDataParallelConfig.from_yaml(path) == DistributedDataParallelConfig(
        bucket_size=80_000_000,
        overlap_grad_reduce=True,
        megatron_fsdp_main_params_dtype=None,
        outer_dp_sharding_strategy="optim",
        param_name_patterns_for_fp32_local_accumulation=("*norm*",),
    )
    assert DistributedDataParallelConfig.from_yaml("# nothing set\n") == DistributedDataParallelConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bucket_size: 1e6", "bucket_size='1e6' is not a positive whole number; give 1 or more."),
        ("overlap_param_gater: true", f"'overlap_param_gater' {NO_FIELD} did you mean 'overlap_param_gather'?"),
        ("ddp:\n  bucket_size: 3\n", f"'ddp' {NO_FIELD} give only the mapping below it."),
        ("nccl_ub: on\nnccl_ub: on", f"not YAML: 'nccl_ub' is there twice on line 2, column 1{PUT_RIGHT}"),
        ("- bucket_size", "the YAML is a list; give a mapping of fields to values."),
        ("ddp.yaml", "the YAML is a str; give a mapping of fields to values; give a path as a pathlib.Path."),
        ("a: [3", f"not YAML: expected ',' or ']', but got '<stream end>' on line 1, column 6{PUT_RIGHT}"),
        ("bucket_size: 2001-99-99", "not YAML: month must be in 1..12"),
        ("nccl_ub: !!python/name:os.getcwd []", f"not YAML: could not determine a constructor for the tag {TAG}"),
    ],
)
def test_yaml_that_is_no_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert refused(text) == message
    assert refused(path) == f"{path}: {message.replace('; give a path as a pathlib.Path', '')}"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for make, reason in ((path.touch, "invalid start byte"), (path.unlink, "No such file or directory")):
        make()
        if path.exists():
            path.write_bytes(b"\xff\xfe")
        assert refused(path) == f"{path} cannot be read: {reason}; give the path of a YAML file."
    assert "cannot be read: embedded null byte; give the path" in refused(Path("a\x00b"))
    assert re.match(r"3 cannot be read: .*; give the path of a YAML file", refused(3))


def test_what_stands_for_any_size_is_refused_at_once() -> None:
    tens = [",".join([f"*a{place}"] * 10) for place in range(12)]
    aliases = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{tens[n]}]\n" for n in range(11))
    merges = "a0: &a0 {x: 1}\n" + "".join(f"a{n + 1}: &a{n + 1}\n  <<: [{tens[n]}]\n" for n in range(11))
    for text in (aliases, merges, "a: &a [*a]\n", "bucket_size: " + "[" * 100_000):
        assert refused(text).startswith("not YAML: ")


def test_whole_numbers_are_decimal() -> None:
    for word in ("010", "1:30", "0x10", "0b11", "-010", "0_1"):
        told = f"bucket_size='{word}' is not a positive whole number; give 1"
        assert refused(f"bucket_size: {word}").startswith(told)
    for text, number in (("7", 7), ("+7", 7), ("1_000", 1000), (str(2**63 - 1), 2**63 - 1)):
        assert DistributedDataParallelConfig.from_yaml(f"bucket_size: {text}").bucket_size == number
