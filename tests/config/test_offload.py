"""Offload: what is read out of an argument, what is refused, and which units a fraction means."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from megatron_fsdp.config.offload import Offload, offload_by_unit, resolve_offload
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError

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


def test_gradients_and_state_follow_the_main_weights() -> None:
    half = resolve_offload({"main_weights": 0.5}, ZERO3)
    assert half == Offload(0.5, 0.5, 0.5)
    assert str(half) == "main_weights 0.5, optimizer_state 0.5, main_gradients 0.5"
    assert str(resolve_offload(["optimizer_state"], ZERO3)) == "optimizer_state"


@pytest.mark.parametrize("number", [Fraction(1, 2), np.float32(0.5)])
def test_a_fraction_is_any_real_number(number: Any) -> None:
    assert resolve_offload({"main_weights": number}, ZERO3) == Offload(0.5, 0.5, 0.5)


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
    with pytest.raises(ConfigurationError) as refused:
        resolve_offload(given, strategy)
    assert message in str(refused.value)


def test_a_fraction_moves_whole_units_from_the_last_to_the_root() -> None:
    offload = resolve_offload({"optimizer_state": 0.5}, ZERO3)
    moved = [each.optimizer_state for each in offload_by_unit(offload, [10, 30, 30, 30])]
    assert moved == [0.0, 0.0, 1.0, 1.0]  # the last holds 0.3, so the one before it goes, too
    assert not any(offload_by_unit(resolve_offload({"optimizer_state": 0.0}, ZERO3), [1, 1]))
    assert all(each.optimizer_state == 1.0 for each in offload_by_unit(Offload(optimizer_state=1.0), [1, 1]))
