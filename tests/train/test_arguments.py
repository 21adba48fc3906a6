from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_fsdp.train.arguments import Arguments, find_strategy, parse_arguments, resolve_settings
from megatron_fsdp.train.presets import PRESETS

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.placement import ShardingStrategy


def test_defaults_are_the_small_preset_fully_sharded() -> None:
    settings = resolve_settings(parse_arguments([]), "cuda")
    assert settings.preset == PRESETS["cpu-small"]
    assert settings.strategy is ShardingStrategy.optim_grads_params
    assert settings.dtype is torch.bfloat16


def test_options_win_over_the_preset() -> None:
    argv = "--preset tiny --steps 7 --batch-size 3 --sequence-length 32 --learning-rate 0.5 --warmup 2 --dtype fp32"
    settings = resolve_settings(parse_arguments(argv.split()), "cpu")
    expected = replace(PRESETS["tiny"], steps=7, batch_size=3, sequence_length=32, learning_rate=0.5, warmup=2)
    assert settings.preset == expected
    assert settings.dtype is torch.float32


def test_a_run_without_time_limit_is_possible() -> None:
    assert resolve_settings(parse_arguments(["--minutes", "inf"]), "cpu").arguments.minutes == float("inf")


def test_short_run_gets_a_short_warm_up() -> None:
    assert resolve_settings(Arguments(preset="cpu-small", steps=30), "cpu").preset.warmup == 3


@pytest.mark.parametrize("strategy", ShardingStrategy)
def test_each_strategy_has_a_name_and_a_number(strategy: ShardingStrategy) -> None:
    assert find_strategy(strategy.name) is find_strategy(str(strategy.value)) is strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "--batch-size 0 is not possible: give 1 or more"),
        ({"grad_accumulation": -1}, "--grad-accumulation -1 is not possible: give 1 or more"),
        ({"ranks": 0}, "--ranks 0 is not possible"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0 is not possible: give a number above 0"),
        ({"clip": float("nan")}, "--clip nan is not possible"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 is not possible: give 0 or more"),
        ({"minutes": float("nan")}, "--minutes nan is not possible"),
        ({"warmup": 50, "steps": 50}, "--warmup 50 does not end within 50 steps"),
        ({"prompt": ""}, "--prompt '' is not possible"),
    ],
)
def test_wrong_numbers_are_refused_by_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_settings(Arguments(**options), "cpu")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("argv", [["--strategy", "5"], ["--preset", "huge"], ["--no-such-option"], ["--steps", "many"]])
def test_unreadable_options_end_with_code_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_quiet_ranks_do_not_repeat_the_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--steps", "many"], quiet=True)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
