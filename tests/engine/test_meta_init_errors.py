"""What cannot be initialised is named, on every rank alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.meta_models import SmallGPT
from tests.support.models import TinyTransformer
from tests.support.parity import fixed_seed


class Gain(nn.Module):
    """A parameter and a buffer, and nothing that sets them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(2), persistent=False)


class Cached(nn.Module):
    """A tensor that is neither parameter nor buffer, and a reset method that forgets it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.cache = torch.ones(2)

    def reset_parameters(self) -> None:
        """Leave the cache as it is."""


class HalfReset(nn.Module):
    """A reset method that leaves one row, one parameter and one integer buffer without a value."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(3, 2))
        self.forgotten = nn.Parameter(torch.empty(2))
        self.given = nn.Parameter(torch.empty(2))
        self.register_buffer("count", torch.empty(2, dtype=torch.int64))
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.rows[1:].fill_(1.0)
            self.given.data.fill_(1.0)
            self.steps.zero_()


class WholeModelReset(SmallGPT):
    """A root that draws every matrix anew, as torch.nn.Transformer does."""

    def reset_parameters(self) -> None:
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.xavier_uniform_(param)


class TakesScale(nn.Linear):
    """A reset method with an argument that may be left out."""

    def reset_parameters(self, scale: float = 0.5) -> None:
        nn.init.constant_(self.weight, scale)
        nn.init.constant_(self.bias, -scale)


class NeedsScale(nn.Module):
    """A reset method that nobody can call without knowing the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2))

    def reset_parameters(self, scale: float) -> None:
        nn.init.constant_(self.weight, scale)


class Whole(nn.Module):
    """A buffer on the meta device next to real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.empty(3, device="meta"))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def several_helpless() -> nn.Module:
    return on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Gain(), nn.Sequential(Gain())))


def root_parameter() -> nn.Module:
    return on_meta(TinyTransformer)


def forgotten_attribute() -> nn.Module:
    return on_meta(Cached)


def half_reset() -> nn.Module:
    return on_meta(HalfReset)


def needs_scale() -> nn.Module:
    return on_meta(NeedsScale)


def whole_model_reset() -> nn.Module:
    return on_meta(WholeModelReset)


def meta_on_rank_one() -> nn.Module:
    return on_meta(SmallGPT) if dist.get_rank() else SmallGPT()


CASES: dict[Callable[[], nn.Module], tuple[str, ...]] = {
    several_helpless: (
        "2 modules hold tensors on the meta device and have no method that initialises them: ",
        ": 1 (Gain: gain, scale); 2.0 (Gain: gain, scale); give each a reset_parameters()",
    ),
    root_parameter: ("1 modules hold", "(root) (TinyTransformer: positions)"),
    forgotten_attribute: ("1 tensors are still on the meta device after", "cache of (root) (Cached)"),
    half_reset: (
        "3 tensors got no value, or NaN,",
        ": rows, forgotten, buffer count of (root) (HalfReset); let reset_",
    ),
    needs_scale: ("1 modules hold", "(root) (NeedsScale: weight)"),
    whole_model_reset: (
        "initialising (root) (WholeModelReset) writes parameters of units below it (such as blocks.0.",
        "fsdp_unit_modules=[] for one unit",
    ),
    meta_on_rank_one: (
        "ranks of the group disagree: rank 0 has 'tokens.weight ",
        "requires_grad=True', rank 1 has 'tokens.weight ",
        "requires_grad=True on the meta device'; give every rank the same model",
    ),
}


def refusal(build: Callable[[], nn.Module], flag: bool = True, **arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        fully_shard_model(build(), init_model_with_meta_device=flag, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_what_cannot_be_initialised_is_refused_alike_on_every_rank(
    build: Callable[[], nn.Module], run_ranks: RunRanks
) -> None:
    first, second = run_ranks(2, refusal, build)
    assert first == second
    for part in CASES[build]:
        assert part in first


def untouched_by_refusal() -> bool:
    model = several_helpless()
    before = dict(model.named_parameters())
    state = torch.get_rng_state()
    refusal(lambda: model)
    after = dict(model.named_parameters())
    return (
        all(param is before[name] and param.is_meta for name, param in after.items())
        and after.keys() == before.keys()
        and torch.equal(torch.get_rng_state(), state)
    )


def test_a_refused_model_and_the_generators_are_as_they_were(run_ranks: RunRanks) -> None:
    assert run_ranks(2, untouched_by_refusal) == [True, True]


def generator_after_failure() -> bool:
    state = torch.get_rng_state()
    refusal(whole_model_reset)
    return torch.equal(torch.get_rng_state(), state)


def test_a_failure_on_the_way_gives_the_random_state_back(run_ranks: RunRanks) -> None:
    assert run_ranks(2, generator_after_failure) == [True, True]


def test_without_the_flag_meta_parameters_are_refused_with_a_pointer_to_it(run_ranks: RunRanks) -> None:
    for message in run_ranks(2, refusal, root_parameter, False):
        assert "parameters are on the meta device (such as positions)" in message
        assert "init_model_with_meta_device is False; set it to let modules initialise themselves" in message


def meta_buffer() -> nn.Module:
    return Whole()


def test_without_the_flag_meta_buffers_are_refused_too(run_ranks: RunRanks) -> None:
    (message,) = run_ranks(1, refusal, meta_buffer, False)
    assert message.startswith("1 of 1 buffers are on the meta device (such as mask) and init_model_with_meta_device is")


def test_with_the_flag_a_meta_buffer_that_nothing_sets_is_named(run_ranks: RunRanks) -> None:
    (message,) = run_ranks(1, refusal, meta_buffer)
    assert "(root) (Whole: mask)" in message
    assert "reset_buffers() for buffers" in message


def whole_model_reset_as_one_unit() -> bool:
    with fixed_seed(3):
        eager = WholeModelReset()
        eager.reset_parameters()
    with fixed_seed(3):
        model = fully_shard_model(whole_model_reset(), fsdp_unit_modules=[], init_model_with_meta_device=True)
    expected = dict(eager.named_parameters())
    return all(torch.equal(weight, expected[name]) for name, weight in model.full_parameters().items())


def test_what_that_error_advises_works(run_ranks: RunRanks) -> None:
    assert run_ranks(2, whole_model_reset_as_one_unit) == [True, True]


def optional_arguments() -> list[float]:
    model = fully_shard_model(on_meta(lambda: TakesScale(4, 4)), init_model_with_meta_device=True)
    return [weight.unique().item() for weight in model.full_parameters().values()]


def test_reset_methods_may_have_arguments_with_defaults(run_ranks: RunRanks) -> None:
    assert run_ranks(1, optional_arguments) == [[0.5, -0.5]]
