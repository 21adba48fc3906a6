"""Switches for memory and scheduling: what they mean together, and what is refused in words."""

from dataclasses import fields, replace
from typing import Any

import pytest
from torch import nn

from megatron_fsdp import DistributedDataParallelConfig
from megatron_fsdp.config.engine_options import MemoryArguments, MemoryOptions, WeightAllocator, resolve_memory_options
from megatron_fsdp.errors import ConfigurationError

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


def test_defaults_are_two_slots_and_one_unit_ahead() -> None:
    options = resolve()
    assert options == MemoryOptions(message_bytes=0)  # as tests set the environment
    assert (options.allocator, options.slots, options.forward_prefetch_units) == (WeightAllocator.SLOTS, 2, 1)


def test_the_environment_says_how_much_is_merged_and_double_buffers_want_units_of_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MFSDP_MESSAGE_BYTES", "7")
    assert resolve().message_bytes == 7
    assert resolve(fsdp_double_buffer=True).message_bytes == 0
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
    assert resolve("optim", overlap_param_gather=False).forward_prefetch_units == 0
    assert resolve("optim", overlap_param_gather=True).forward_prefetch_units == 1
    assert resolve(overlap_param_gather=False).forward_prefetch_units == 1


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
    (
        OPTIM,
        {"forward_prefetch_units": 1, **LATE},
        "forward_prefetch_units=1 has no effect with overlap_param_gather",
    ),
    ("no_shard", {"backward_prefetch_units": 1}, "backward_prefetch_units=1 has no effect under no_shard"),
    (FULL, {"forward_prefetch_units": 1, SIZE: 100}, f"{SIZE}=100 both say how far to gather ahead"),
    (FULL, {"disable_bucketing": True, "bucket_size": 5}, "disable_bucketing=True and bucket_size=5 contradict"),
    (FULL, {f"{FINE[:-5]}_backward_hook": True}, f"{FINE[:-5]}_backward_hook=True needs {FINE}=True"),
    (FULL, {"fine_grained_recurse_module_types": [nn.Linear]}, f"needs {FINE}=True, since modules are gathered alike"),
    ("no_shard", {f"megatron_fsdp_{FINE[:-5]}": True}, f"{FINE[:-5]}=True has no effect under no_shard"),
]


@pytest.mark.parametrize(("strategy", "given", "message"), REFUSED)
def test_what_cannot_take_effect_is_refused_in_words(strategy: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(strategy, **given)
    assert message in str(caught.value)


def test_types_to_take_whole_are_classes_of_modules() -> None:
    given = {"enable_fine_grained_param_gather_hook": True, "fine_grained_recurse_module_types": [nn.Linear, 3]}
    with pytest.raises(TypeError, match="has the entry 3, which is not a subclass of"):
        resolve(**given)


def test_models_without_units_refuse_what_concerns_units() -> None:
    for name in ("fsdp_double_buffer", "enable_fine_grained_param_gather_hook"):
        options = resolve(**{name: True})
        options.check_plan(1)
        with pytest.raises(ConfigurationError, match="has no effect on a model without units besides the root; name"):
            options.check_plan(0)
