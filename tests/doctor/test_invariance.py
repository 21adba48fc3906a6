"""`check_invariance`: what gives a microbatch other bits is named with its module and operator; clean models pass."""

import json
import random
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp.cli.main import main
from megatron_fsdp.doctor import Variance, check_invariance
from megatron_fsdp.errors import ConfigurationError
from tests.doctor import patients
from tests.support.on_ranks import on_ranks

AGAIN, AFTER, RANK = "computed again", "computed after another microbatch", "computed on rank 1 in place of rank 0"
_CALLS = count()


@torch.library.custom_op("mfsdp_tests::sum_in_any_order", mutates_args=())
def sum_in_any_order(x: Tensor) -> Tensor:
    """A sum over samples as with atomics: in whatever order they come."""
    first, total = next(_CALLS), torch.zeros_like(x[0])
    for index in range(len(x)):
        total += x[(first + index) % len(x)] * 7 ** ((first + index) % len(x))
    return total


class AnyOrder(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad + sum_in_any_order(grad)


class Planted(nn.Module):
    """A linear layer, a fault, and another layer."""

    def __init__(self, fault: nn.Module) -> None:
        super().__init__()
        self.first, self.fault, self.last = nn.Linear(6, 6), fault, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fault(self.first(x))).square().mean()


class OwnGenerator(nn.Module):
    """Dropout from a generator that is made once, and seeded once."""

    generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5, generator=self.generator)


class ByPosition(nn.Module):
    """Dropout seeded by the number of the call, as by a position in the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.manual_seed(self.calls)
        return nn.functional.dropout(x)


class ByRank(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + dist.get_rank())


class Carried(nn.Module):
    """Divides by a mean of all microbatches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.size.lerp_(x.detach().abs().mean(), 0.5)
        return x / self.size


class PythonNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class InForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + sum_in_any_order(x.detach())


class InBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return AnyOrder.apply(x)


FAULTS: dict[type[nn.Module], tuple[str, str, bool, bool]] = {
    OwnGenerator: (AGAIN, "aten.bernoulli_", False, True),
    PythonNoise: (AGAIN, "aten.mul", False, False),
    InForward: (AGAIN, "mfsdp_tests.sum_in_any_order", False, False),
    InBackward: (AGAIN, "mfsdp_tests.sum_in_any_order", True, False),
    ByPosition: (AFTER, "aten.bernoulli_", False, True),
    Carried: (AFTER, "aten.div", False, False),
    ByRank: (RANK, "aten.mul", False, False),
}


CARRIED = "computed after another microbatch, aten.div of module `fault` has other bits in forward"


def build_carried() -> nn.Module:
    return planted(Carried)


def planted(kind: type[nn.Module]) -> nn.Module:
    return Planted(kind())


@on_ranks(2)
def test_what_is_not_invariant_is_named() -> None:
    for kind, (way, operator, backward, is_random) in FAULTS.items():
        found = check_invariance(lambda kind=kind: planted(kind), patients.vectors)
        assert found, kind
        assert found[0] == Variance(way, "fault", operator, backward, is_random), kind
        assert f"{way}, {operator} of module `fault` has other bits in" in found[0].told()


@on_ranks(2)
def test_what_is_carried_differs_after_another_microbatch_alone() -> None:
    (found,) = check_invariance(lambda: planted(Carried), patients.vectors)
    assert found.told() == ("computed after another microbatch, aten.div of module `fault` has other bits in forward")


@on_ranks(2)
def test_clean_models_pass() -> None:
    for model_fn, batch, loss_fn in (
        (patients.build, patients.tokens, None),
        (patients.build_batch_norm, patients.vectors, patients.square_loss),
        (lambda: Planted(nn.Dropout()), patients.vectors, None),
    ):
        assert check_invariance(model_fn, batch, loss_fn=loss_fn) == ()


@on_ranks(1)
def test_one_microbatch_is_too_few() -> None:
    with pytest.raises(ConfigurationError, match="over two microbatches or more; give microbatches or ranks"):
        check_invariance(patients.build, patients.tokens)
    assert check_invariance(patients.build, patients.tokens, microbatches=2) == ()


def test_the_command_names_what_is_not_invariant(capfd: pytest.CaptureFixture[str]) -> None:
    here = "tests.doctor.test_invariance:build_carried"
    words = ["doctor", here, "--batch", "tests.doctor.patients:vectors", "--invariance", "--device", "cpu"]
    assert main(words) == 1
    assert capfd.readouterr().out == f"{CARRIED}\nDIFFERS: one microbatch, computed in 4 ways\n"
    words[1] = "tests.doctor.patients:build"
    words[3] = "tests.doctor.patients:tokens"
    assert main([*words, "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"passed": True, "differences": []}
