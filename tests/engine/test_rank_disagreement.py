"""A mistake that only some ranks can see stops every rank with the same message; nobody hangs.

A call that hangs is killed by the worker pool after `_TIMEOUT_S`, and fails the test with the stacks of all ranks.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.conftest import RunRanks
from tests.support.api_net import Layer, Net, build, largest_difference, mesh, message_of, weights

_TIMEOUT_S = 15.0


def on_rank_one() -> bool:
    return dist.get_rank() == 1


def shard(model: nn.Module, **arguments: Any) -> nn.Module:
    return fully_shard_model(model, mesh(), **{"fsdp_unit_modules": [Layer], **arguments})


# ---- one rank's model differs ----------------------------------------------------------------------------------------


def other_shape() -> None:
    model = build()
    if on_rank_one():
        model.head = nn.Linear(5, 4)
    shard(model)


def other_name() -> None:
    model = build()
    if on_rank_one():
        del model.gain
        model.register_parameter("gains", nn.Parameter(torch.ones(4)))
    shard(model)


def other_requires_grad() -> None:
    model = build()
    model.head.bias.requires_grad_(not on_rank_one())
    shard(model)


def other_dtype() -> None:
    model = build()
    if on_rank_one():
        model.head.to(torch.float64)
    shard(model)


def one_parameter_more() -> None:
    model = build()
    if on_rank_one():
        model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    shard(model)


MODELS: dict[Callable[[], None], tuple[str, str]] = {
    other_shape: (
        "head.weight (3, 5) torch.float32 requires_grad=True",
        "head.weight (4, 5) torch.float32 requires_grad=True",
    ),
    other_name: ("gain (4,) torch.float32 requires_grad=True", "gains (4,) torch.float32 requires_grad=True"),
    other_requires_grad: (
        "head.bias (3,) torch.float32 requires_grad=True",
        "head.bias (3,) torch.float32 requires_grad=False",
    ),
    other_dtype: (
        "head.weight (3, 5) torch.float32 requires_grad=True",
        "head.weight (3, 5) torch.float64 requires_grad=True",
    ),
    one_parameter_more: ("layers.0", "extra (2,) torch.float32 requires_grad=True"),
}


# ---- one rank asks for something else, or is the only one to see the mistake -----------------------------------------


def other_strategy() -> None:
    shard(build(), zero_dp_strategy=2 + on_rank_one())


def other_units() -> None:
    shard(build(), fsdp_unit_modules=[nn.Linear] if on_rank_one() else [Layer])


def other_precision() -> None:
    shard(build(), mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=(None, torch.float64)[on_rank_one()]))


def other_gradient_factor() -> None:
    shard(build(), calculate_per_token_loss=on_rank_one())


def one_buffer_more() -> None:
    model = build()
    if on_rank_one():
        model.register_buffer("counter", torch.zeros(1))
    shard(model)


def other_buffer_shape() -> None:
    model = build()
    if on_rank_one():
        model.register_buffer("offset", torch.ones(5))
    shard(model)


def other_tying() -> None:
    model = build()
    if not on_rank_one():
        model.layers[1].linear.weight = model.layers[0].linear.weight  # type: ignore[union-attr]
    shard(model)


def meta_on_one_rank() -> None:
    with torch.device("meta" if on_rank_one() else "cpu"):
        model = Net()
    shard(model)


def no_parameters_on_one_rank() -> None:
    shard(nn.ReLU() if on_rank_one() else build(), fsdp_unit_modules=None)


def wrong_unit_class_on_one_rank() -> None:
    shard(build(), fsdp_unit_modules=[nn.Conv2d] if on_rank_one() else [Layer])


def sharded_already_on_one_rank() -> None:
    model = build()
    if on_rank_one():
        model.gain._megatron_fsdp_model = None  # type: ignore[attr-defined]  # as a sharded parameter carries
    shard(model)


def foreign_optimizer_on_one_rank() -> None:
    model = build()
    owner = build() if on_rank_one() else model
    fully_shard(model, torch.optim.SGD(owner.parameters(), lr=0.1), mesh(), fsdp_unit_modules=[Layer])


CHOICES = [
    other_strategy,
    other_units,
    other_precision,
    other_gradient_factor,
    one_buffer_more,
    other_buffer_shape,
    other_tying,
]
SEEN_BY_ONE = [
    meta_on_one_rank,
    no_parameters_on_one_rank,
    wrong_unit_class_on_one_rank,
    sharded_already_on_one_rank,
    foreign_optimizer_on_one_rank,
]


def outcome_of(case: Callable[[], None]) -> tuple[str, str] | None:
    """What the case raised, and None where it raised nothing."""
    try:
        case()
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent looks at it
        return message_of(error)
    return None


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.__name__)
def test_different_models_are_refused_alike_on_every_rank(case: Callable[[], None], run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, outcome_of, case, timeout_s=_TIMEOUT_S)
    assert first == second
    kind, message = first
    assert kind == "ConfigurationError"
    left, right = MODELS[case]
    assert message.startswith(f"ranks of the group disagree: rank 0 has '{left}")
    assert f", rank 1 has '{right}" in message
    assert message.endswith("give every rank the same model and arguments")


@pytest.mark.parametrize("case", CHOICES, ids=lambda case: case.__name__)
def test_different_choices_are_refused_alike_on_every_rank(case: Callable[[], None], run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, outcome_of, case, timeout_s=_TIMEOUT_S)
    assert first is not None, "was accepted"
    assert first == second
    assert first[0] in ("ConfigurationError", "RankError")
    assert "rank" in first[1]


@pytest.mark.parametrize("case", SEEN_BY_ONE, ids=lambda case: case.__name__)
def test_what_one_rank_sees_is_told_by_every_rank(case: Callable[[], None], run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, outcome_of, case, timeout_s=_TIMEOUT_S)
    assert first is not None
    assert first == second
    assert first[0] in ("ConfigurationError", "RankError")


# ---- different values are not a mistake that stops -------------------------------------------------------------------


def wrap_differently_seeded(strategy: int) -> tuple[float, float, list[str]]:
    model = build(seed=dist.get_rank())
    model.offset.fill_(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = fully_shard_model(model, mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    return (
        largest_difference(weights(wrapped), weights(build(seed=0))),
        model.offset.max().item(),
        [str(warning.message) for warning in caught],
    )


@pytest.mark.parametrize("strategy", [0, 3])
def test_all_ranks_get_the_weights_of_rank_zero_and_one_warning(strategy: int, run_ranks: RunRanks) -> None:
    for difference, offset, caught in run_ranks(2, wrap_differently_seeded, strategy):
        assert (difference, offset) == (0.0, 0.0)
        assert len(caught) == 1
        # `gain` is all ones under every seed: 6 parameters and the buffer differ
        assert caught[0].startswith("7 parameters or buffers differed between ranks at wrap time (first: layers.0.")


def warnings_when_seeded_alike() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer])
    return [str(warning.message) for warning in caught]


def test_ranks_that_agree_are_not_warned(run_ranks: RunRanks) -> None:
    assert run_ranks(2, warnings_when_seeded_alike) == [[], []]
