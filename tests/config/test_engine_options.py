"""What options of the engine, precision and offload become, and which combinations are refused."""

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from megatron_fsdp import DistributedDataParallelConfig
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import (
    MemoryArguments,
    MemoryOptions,
    Offload,
    WeightAllocator,
    offload_by_unit,
    resolve_memory_options,
    resolve_offload,
)
from megatron_fsdp.config.precision import MixedPrecisionPolicy, ResolvedPrecision, dtype_from_name, resolve_precision
from megatron_fsdp.errors import ConfigurationError
from tests.support.on_ranks import refusal

DOUBLE = {"fsdp_double_buffer": True}
PERSIST = {"fsdp_db_use_persist_buf_on_alloc_fail": True}
MAX_POOL = {"megatron_fsdp_max_pool_double_buffer": True}
LATE = {"overlap_param_gather": False}
SIZE = "suggested_communication_unit_size"
FEWER = "{}_prefetch_units={} needs {} units gathered at a time, and {} are allowed"


def resolve(strategy: str = "optim_grads_params", /, **options: Any) -> MemoryOptions:
    """Arguments of the class go there, all others into the configuration."""
    names = [field.name for field in fields(MemoryArguments) if field.name in options]
    given = MemoryArguments(**{name: options.pop(name) for name in names})
    options = {"overlap_param_gather": True, **options}
    return resolve_memory_options(
        given, DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, **options)
    )


def test_defaults_are_two_slots_one_unit_ahead_and_what_the_environment_says_of_merging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = resolve()
    assert options == MemoryOptions()
    assert (options.allocator, options.slots, options.forward_prefetch_units) == (WeightAllocator.SLOTS, 2, 1)
    monkeypatch.setenv("MFSDP_MESSAGE_BYTES", "7")
    assert resolve().message_bytes == 7
    assert resolve(fsdp_double_buffer=True).message_bytes == 0  # which wants units of one size
    monkeypatch.delenv("MFSDP_MESSAGE_BYTES")
    assert resolve().message_bytes is None


@pytest.mark.parametrize(
    ("given", "allocator"),
    [
        ({"weight_allocator": "resize"}, WeightAllocator.RESIZE),
        (DOUBLE, WeightAllocator.DOUBLE_BUFFER),
        ({**DOUBLE, **PERSIST}, WeightAllocator.PERSISTENT_DOUBLE_BUFFER),
        (MAX_POOL, WeightAllocator.MAX_POOL),
    ],
)
def test_options_name_an_allocator(given: dict[str, Any], allocator: WeightAllocator) -> None:
    assert resolve(**given).allocator is allocator


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        (DOUBLE, ["fsdp_double_buffer"]),
        (MAX_POOL, ["maxpool_double_buffer"]),
        ({**DOUBLE, **PERSIST}, ["fsdp_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail"]),
    ],
)
def test_double_buffers_for_whole_weights_change_nothing(given: dict[str, Any], idle: list[str]) -> None:
    for strategy in ("no_shard", "optim", "optim_grads"):
        found = resolve(strategy, **given)
        assert found == replace(resolve(strategy), idle=found.idle)
        assert [sentence.partition(f"=True has no effect under {strategy}, ")[0] for sentence in found.idle] == idle


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"disable_symmetric_registration": True}, "disable_symmetric_registration=True has no effect without nccl_ub"),
        (PERSIST, "fsdp_db_use_persist_buf_on_alloc_fail=True has no effect without fsdp_double_buffer=True"),
        ({**PERSIST, **MAX_POOL}, "buf_on_alloc_fail=True has no effect with a pool that every unit fits"),
    ],
)
def test_what_the_published_package_takes_alone_is_idle(given: dict[str, Any], words: str) -> None:
    found = resolve(**given)
    assert len(found.idle) == 1
    assert words in found.idle[0]
    doubled = {name: value for name, value in given.items() if "max_pool" in name}
    assert found == replace(resolve(**doubled), idle=found.idle)


@pytest.mark.parametrize(
    ("given", "forward", "backward", "slots", "may_grow"),
    [
        ({"max_gathered_units": 1}, 0, 0, 1, False),
        ({"max_gathered_units": 5}, 1, 1, 5, False),
        ({"forward_prefetch_units": 3}, 3, 1, 4, True),
        ({"backward_prefetch_units": 2, "forward_prefetch_units": 0}, 0, 2, 3, True),
        ({"forward_prefetch_units": 0, "backward_prefetch_units": 0}, 0, 0, 2, True),
        ({"forward_prefetch_units": 2, "max_gathered_units": 3}, 2, 1, 3, False),
        (DOUBLE, 1, 1, 2, False),
    ],
)
def test_depths_and_slots_are_derived_from_one_another(
    given: dict[str, Any], forward: int, backward: int, slots: int, may_grow: bool
) -> None:
    options = resolve(**given)
    found = (options.forward_prefetch_units, options.backward_prefetch_units, options.slots, options.may_grow)
    assert found == (forward, backward, slots, may_grow)


def test_without_overlap_nothing_is_gathered_ahead_but_under_strategy_3() -> None:
    for strategy, overlaps, units in (("optim", False, 0), ("optim", True, 1), ("optim_grads_params", False, 1)):
        assert resolve(strategy, overlap_param_gather=overlaps).forward_prefetch_units == units


def test_buckets_outside_of_units_follow_the_number_of_ranks() -> None:
    assert resolve().root_group_numel_on(8) == 40_000_000
    assert resolve().root_group_numel_on(64) == 64_000_000
    assert resolve(bucket_size=7).root_group_numel_on(64) == 7
    assert resolve(disable_bucketing=True).root_group_numel_on(64) is None


FINE = "enable_fine_grained_param_gather_hook"
FULL, OPTIM = "optim_grads_params", "optim"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (FULL, {"weight_allocator": "pool"}, "weight_allocator='pool' does not exist; give \"slots\""),
    (OPTIM, {"weight_allocator": "resize"}, "has no effect under optim, where every rank holds whole weights"),
    (OPTIM, {"max_gathered_units": 2}, "max_gathered_units=2 has no effect under optim, where"),
    (FULL, {"max_gathered_units": 0}, "max_gathered_units=0 is not a whole number of units; give 1"),
    (FULL, {"max_gathered_units": True}, "max_gathered_units=True is not a whole number of units"),
    (FULL, {"forward_prefetch_units": -1}, "forward_prefetch_units=-1 is not a whole number of units"),
    (FULL, {"max_gathered_units": 3, "backward_prefetch_units": 3}, FEWER.format("backward", 3, 4, 3)),
    (FULL, {**DOUBLE, "forward_prefetch_units": 2}, FEWER.format("forward", 2, 3, 2)),
    (FULL, {**DOUBLE, "max_gathered_units": 3}, "max_gathered_units=3 contradicts a double buffer"),
    (FULL, {**DOUBLE, "weight_allocator": "resize"}, "are two ways to hold gathered weights; give only one"),
    (OPTIM, {"forward_prefetch_units": 1, **LATE}, "forward_prefetch_units=1 has no effect with overlap_param_gather"),
    ("no_shard", {"backward_prefetch_units": 1}, "backward_prefetch_units=1 has no effect under no_shard"),
    (FULL, {"forward_prefetch_units": 1, SIZE: 100}, f"{SIZE}=100 both say how far to gather ahead"),
    (FULL, {"disable_bucketing": True, "bucket_size": 5}, "disable_bucketing=True and bucket_size=5 contradict"),
    (FULL, {f"{FINE[:-5]}_backward_hook": True}, f"{FINE[:-5]}_backward_hook=True needs {FINE}=True"),
    (FULL, {"fine_grained_recurse_module_types": [nn.Linear]}, f"needs {FINE}=True, since modules are gathered alike"),
    ("no_shard", {f"megatron_fsdp_{FINE[:-5]}": True}, f"{FINE[:-5]}=True has no effect under no_shard"),
]


@pytest.mark.parametrize(("strategy", "given", "message"), REFUSED)
def test_what_cannot_take_effect_is_refused_in_words(strategy: str, given: dict[str, Any], message: str) -> None:
    assert message in refusal(resolve, strategy, error=ConfigurationError, **given)


def test_types_to_take_whole_are_classes_of_modules() -> None:
    given = {"enable_fine_grained_param_gather_hook": True, "fine_grained_recurse_module_types": [nn.Linear, 3]}
    assert "has the entry 3, which is not a subclass of" in refusal(resolve, error=TypeError, **given)


def test_models_without_units_refuse_what_concerns_units() -> None:
    for name in ("fsdp_double_buffer", "enable_fine_grained_param_gather_hook"):
        options = resolve(**{name: True})
        options.check_plan(1)
        with pytest.raises(ConfigurationError, match="has no effect on a model without units besides the root; name"):
            options.check_plan(0)


# ---- the precision policy: what it accepts and what following means --------------------------------------------------


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FIELDS = ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype")


FOUR = "; give one of torch.float16, torch.bfloat16, torch.float32, torch.float64, or None to follow."


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ["bf16", 32, float, torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_objects_and_dtypes_that_cannot_accumulate_are_refused(field: str, value: object) -> None:
    is_dtype = isinstance(value, torch.dtype)
    told = refusal(MixedPrecisionPolicy, error=ConfigurationError if is_dtype else TypeError, **{field: value})
    assert told == f"{field}={value!r} {'cannot be used' if is_dtype else 'is not a torch.dtype'}{FOUR}"


@pytest.mark.parametrize(
    ("policy", "param_dtype", "expected"),
    [
        (MixedPrecisionPolicy(), BF16, ResolvedPrecision(BF16, FP32, BF16, BF16, has_main_copy=True)),
        (MixedPrecisionPolicy(), FP32, ResolvedPrecision(FP32, FP32, FP32, FP32, has_main_copy=False)),
        (MixedPrecisionPolicy(), FP64, ResolvedPrecision(FP64, FP32, FP64, FP64, has_main_copy=True)),
        (MixedPrecisionPolicy(None), BF16, ResolvedPrecision(BF16, BF16, BF16, BF16, has_main_copy=False)),
        (MixedPrecisionPolicy(FP32, FP32), BF16, ResolvedPrecision(BF16, FP32, FP32, FP32, has_main_copy=True)),
        (MixedPrecisionPolicy(FP32, FP32, BF16), BF16, ResolvedPrecision(BF16, FP32, FP32, BF16, has_main_copy=True)),
        (MixedPrecisionPolicy(None, None, FP16), FP32, ResolvedPrecision(FP32, FP32, FP32, FP16, has_main_copy=False)),
        (MixedPrecisionPolicy(FP64, FP64), FP32, ResolvedPrecision(FP32, FP64, FP64, FP64, has_main_copy=True)),
        *(
            (MixedPrecisionPolicy(FP32, FP32, BF16), kind, ResolvedPrecision(*[kind] * 4, has_main_copy=False))
            for kind in (torch.int8, torch.bool, torch.complex64)
        ),
    ],
)
def test_none_follows_and_what_is_no_real_number_keeps_its_dtype(
    policy: MixedPrecisionPolicy, param_dtype: torch.dtype, expected: ResolvedPrecision
) -> None:
    assert resolve_precision(policy, param_dtype) == expected


def test_float8_parameters_need_main_weights_and_their_gradients_are_bfloat16() -> None:
    float8 = torch.float8_e4m3fn
    assert resolve_precision(MixedPrecisionPolicy(), float8) == ResolvedPrecision(
        float8, FP32, BF16, BF16, has_main_copy=True
    )
    without = MixedPrecisionPolicy(main_params_dtype=None)
    assert refusal(resolve_precision, without, torch.float8_e5m2, error=ConfigurationError) == (
        "main_params_dtype=None leaves torch.float8_e5m2 parameters without weights that an optimizer can update; "
        "set main_params_dtype=torch.float32."
    )


def test_dtype_names_are_understood_or_refused() -> None:
    names = {"bf16": BF16, "torch.bfloat16": BF16, "fp16": FP16, "half": FP16, "float": FP32, "torch.float64": FP64}
    assert {name: dtype_from_name(name) for name in names} == names
    with pytest.raises(ConfigurationError, match=r"^main='bf61' is not a dtype name; give one of fp16, half, float16,"):
        dtype_from_name("bf61", "main")


# ---- offload: what is read out of an argument, what is refused, and which units a fraction means ---------------------


ZERO3 = ShardingStrategy.optim_grads_params


@pytest.mark.parametrize("nothing", [None, {}, (), OffloadPolicy(), {"main_weights": 0}])
def test_nothing_is_offloaded_unless_it_is_said(nothing: Any) -> None:
    assert resolve_offload(nothing, ZERO3) == Offload()
    assert not resolve_offload(nothing, ZERO3)
    assert str(Offload()) == "nothing"


@pytest.mark.parametrize("shorthand", ["all", CPUOffloadPolicy()])
def test_a_shorthand_offloads_every_kind(shorthand: Any) -> None:
    assert resolve_offload(shorthand, ZERO3) == Offload(1.0, 1.0, 1.0, 1.0)
    assert resolve_offload(shorthand, ShardingStrategy.optim) == Offload(1.0, 1.0, 1.0)  # whole weights are in use


def test_gradients_and_state_follow_the_main_weights_by_any_real_number() -> None:
    for number in (0.5, Fraction(1, 2), np.float32(0.5)):
        assert (half := resolve_offload({"main_weights": number}, ZERO3)) == Offload(0.5, 0.5, 0.5)
    assert str(half) == "main_weights 0.5, optimizer_state 0.5, main_gradients 0.5"
    assert str(resolve_offload(["optimizer_state"], ZERO3)) == "optimizer_state"


@pytest.mark.parametrize(
    ("given", "strategy", "message"),
    [
        (3, ZERO3, 'offload=3 is none of: "all", CPUOffloadPolicy()'),
        ("host", ZERO3, "offload='host' is none of: \"all\""),
        ([["main_weights"]], ZERO3, "offload=[['main_weights']] is none of: \"all\""),
        (b"all", ZERO3, "offload=b'all' is none of"),
        (["weights"], ZERO3, "offload has 'weights'; the kinds of state are main_weights, optimizer_state"),
        ({"main_weights": "host"}, ZERO3, "offload['main_weights'] is 'host'; give a fraction, a number from 0 to 1"),
        ({"main_weights": 2}, ZERO3, "offload['main_weights'] is 2; give a fraction"),
        ({"main_weights": True}, ZERO3, "offload['main_weights'] is True; give a fraction"),
        (["main_gradients"], ZERO3, "torch wants a gradient beside its parameter"),
        ({"main_weights": 1, "optimizer_state": 0}, ZERO3, "or leave optimizer_state out"),
        (
            {"main_weights": 0.5, "optimizer_state": 1.0},
            ZERO3,
            "has the fraction 1 for optimizer_state and 0.5 for main_weights",
        ),
        (["compute_weights"], ShardingStrategy.optim_grads, "use zero_dp_strategy 3"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, strategy: ShardingStrategy, message: str) -> None:
    assert message in refusal(resolve_offload, given, strategy, error=ConfigurationError)


def test_a_fraction_moves_whole_units_from_the_last_to_the_root() -> None:
    offload = resolve_offload({"optimizer_state": 0.5}, ZERO3)
    moved = [each.optimizer_state for each in offload_by_unit(offload, [10, 30, 30, 30])]
    assert moved == [0.0, 0.0, 1.0, 1.0]  # the last holds 0.3, so the one before it goes, too
    assert not any(offload_by_unit(resolve_offload({"optimizer_state": 0.0}, ZERO3), [1, 1]))
    assert all(each.optimizer_state == 1.0 for each in offload_by_unit(Offload(optimizer_state=1.0), [1, 1]))
