"""Where state rests: what is read out of an argument, what is refused, and which units a fraction means."""

from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from megatron_fsdp.config.homes import Home, Homes, homes_by_unit, resolve_homes
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError

ZERO3 = ShardingStrategy.optim_grads_params
HOST = Home(is_away=True)


@pytest.mark.parametrize("nothing", [None, {}, OffloadPolicy(), {"main_weights": "device"}])
def test_everything_rests_on_the_device_unless_it_is_said(nothing: Any) -> None:
    assert resolve_homes(nothing, ZERO3) == Homes()
    assert not resolve_homes(nothing, ZERO3).are_away


@pytest.mark.parametrize("shorthand", ["host", CPUOffloadPolicy()])
def test_a_shorthand_moves_all_state(shorthand: Any) -> None:
    assert resolve_homes(shorthand, ZERO3) == Homes(HOST, HOST, HOST, HOST)
    assert resolve_homes(shorthand, ShardingStrategy.optim) == Homes(HOST, HOST, HOST)  # whole weights are in use


def test_gradients_and_state_follow_the_main_weights() -> None:
    half = {"main_weights": {"home": "host", "fraction": 0.5}}
    assert resolve_homes(half, ZERO3) == Homes(*[Home(is_away=True, fraction=0.5)] * 3)
    assert str(resolve_homes(half, ZERO3)) == "main_weights host, optimizer_state host, main_gradients host"


@pytest.mark.parametrize(
    ("given", "strategy", "message"),
    [
        (3, ZERO3, "homes=3 is a int; give a mapping"),
        ({"weights": "host"}, ZERO3, "homes has 'weights'; the kinds of state are main_weights, optimizer_state"),
        ({"main_weights": "disk"}, ZERO3, 'does not exist; give "device" or "host"'),
        ({"main_weights": {"home": "host", "part": 1}}, ZERO3, "with 'home' and 'fraction'"),
        ({"main_weights": {"home": "host", "fraction": 2}}, ZERO3, "the fraction 2; give a number from 0 to 1"),
        ({"main_weights": {"home": "device", "fraction": 0.5}}, ZERO3, "it stays on the device; give that alone"),
        ({"main_gradients": "host"}, ZERO3, "torch wants a gradient beside its parameter"),
        ({"main_weights": "host", "optimizer_state": "device"}, ZERO3, "so leave optimizer_state out"),
        (
            {"main_weights": {"home": "host", "fraction": 0.5}, "optimizer_state": "host"},
            ZERO3,
            "has the fraction 1 for optimizer_state and 0.5 for main_weights",
        ),
        ({"compute_weights": "host"}, ShardingStrategy.optim_grads, "use zero_dp_strategy 3"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, strategy: ShardingStrategy, message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        resolve_homes(given, strategy)
    assert message in str(refused.value)


def test_a_fraction_moves_whole_units_from_the_last_to_the_root() -> None:
    homes = resolve_homes({"optimizer_state": {"home": "host", "fraction": 0.5}}, ZERO3)
    moved = [each.optimizer_state.is_away for each in homes_by_unit(homes, [10, 30, 30, 30])]
    assert moved == [False, False, True, True]  # the last holds 0.3, so the one before it goes, too
    none = resolve_homes({"optimizer_state": {"home": "host", "fraction": 0.0}}, ZERO3)
    assert not any(each.are_away for each in homes_by_unit(none, [1, 1]))
    assert all(each.optimizer_state == HOST for each in homes_by_unit(Homes(optimizer_state=HOST), [1, 1]))
