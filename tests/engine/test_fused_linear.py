"""Weight gradients that linears write straight into the bucket: the same numbers, and no tensor of their own."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.engine import engine
from megatron_fsdp.engine.fused_linear import FusedLinear
from megatron_fsdp.engine.gradients import GradientBuffers
from tests.conftest import RunRanks

WIDTH = 8


# ---- against the option switched off, bit for bit ------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run: gradients, how many weight gradients went straight, and how many were copied."""

    grads: dict[str, Tensor | None]
    output: Tensor
    written: int
    copied: int


@dataclass(frozen=True)
class Case:
    """One way to run forward and backward, and how many weight gradients of how many then go straight."""

    play: Callable[[nn.Module, Tensor], Tensor]
    written: int
    copied: int
    shape: tuple[int, ...] = (4, WIDTH)
    options: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32


class Pair(nn.Module):
    """A unit of two linears: three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build(dtype: torch.dtype) -> nn.Module:
    """Two pairs: four weights that can go straight, and two biases."""
    torch.manual_seed(0)
    return nn.Sequential(Pair(), Pair()).to(dtype)


def see(case: Case, strategy: int, fused: bool) -> Seen:
    """Run a case on this rank."""
    model = build(case.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None), **dict(case.options)}
    each_by_itself = mock.patch.object(engine, "direct_hook", lambda *args: args[-1])
    with warnings.catch_warnings(), each_by_itself:
        warnings.filterwarnings("ignore", "gradient_accumulation_fusion=True has no effect")
        sharded, _ = fully_shard(
            model,
            optimizer,
            fsdp_unit_modules=[Pair],
            zero_dp_strategy=strategy,
            gradient_accumulation_fusion=fused,
            **options,
        )
    tensor = torch.randn(case.shape, generator=torch.Generator().manual_seed(1)).to(case.dtype).requires_grad_()
    calls: dict[str, int] = {"note_written": 0, "add": 0}

    def counted(name: str) -> Any:
        whole = getattr(GradientBuffers, name)

        def method(self: GradientBuffers, *args: Any) -> None:
            calls[name] += 1
            whole(self, *args)

        return mock.patch.object(GradientBuffers, name, method)

    with counted("note_written"), counted("add"):
        output = case.play(sharded, tensor)
    sharded.finish_grad_sync()
    grads = {name: None if grad is None else grad.clone() for name, grad in sharded.full_gradients().items()}
    grads["input"] = tensor.grad
    return Seen(grads, output.detach(), calls["note_written"], calls["add"])


def backward(model: nn.Module, tensor: Tensor) -> Tensor:
    output: Tensor = model(tensor)
    output.square().sum().backward()
    return output


def twice_deferred(model: nn.Module, tensor: Tensor) -> Tensor:
    with model.no_sync():  # type: ignore[operator]
        backward(model, tensor)
    return backward(model, tensor)


def retained(model: nn.Module, tensor: Tensor) -> Tensor:
    output: Tensor = model(tensor)
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
    return output


def without_input_gradient(model: nn.Module, tensor: Tensor) -> Tensor:
    return backward(model, tensor.detach())


def in_autocast(model: nn.Module, tensor: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output: Tensor = model(tensor)
    output.float().square().sum().backward()
    return output


def autograd_of_the_input(model: nn.Module, tensor: Tensor) -> Tensor:
    (tensor.grad,) = torch.autograd.grad(model(tensor).square().sum(), [tensor])
    return tensor.grad


def backward_to_the_input(model: nn.Module, tensor: Tensor) -> Tensor:
    output: Tensor = model(tensor)
    output.square().sum().backward(inputs=[tensor])
    return output


class _Asks(nn.Module):
    """Asks for the gradient of a weight inside of a forward, where it is full."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.found: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        (self.found,) = torch.autograd.grad(self.inner(x).square().sum(), [self.inner.weight])
        return self.inner(x)


def autograd_of_a_weight(model: nn.Module, tensor: Tensor) -> Tensor:
    pair = model.module[0]  # type: ignore[index, union-attr]
    pair.up = _Asks(pair.up)
    backward(model, tensor)
    assert pair.up.found is not None
    return pair.up.found


def twice_differentiated(model: nn.Module, tensor: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(model(tensor).square().sum(), [tensor], create_graph=True)
    (tensor.grad,) = torch.autograd.grad(slope.square().sum(), [tensor])
    return slope


def watched(model: nn.Module, tensor: Tensor) -> Tensor:
    """A hook of the user on a full weight, put there from inside."""
    seen = []
    inner = model.module[0].up  # type: ignore[index, union-attr]
    handle = inner.register_forward_pre_hook(lambda m, _: seen.append(m.weight.register_hook(lambda g: 2 * g)) and None)
    output = backward(model, tensor)
    handle.remove()
    assert len(seen) == 1
    return output


CHECKED = (("report_nan_in_param_grad", True),)
WIDER = (("mixed_precision_policy", MixedPrecisionPolicy(None, torch.float64, torch.float64)),)
CASES = {
    "matrix": Case(backward, 4, 2),
    "three dimensions": Case(backward, 4, 2, (2, 3, WIDTH)),
    "four dimensions": Case(backward, 4, 2, (2, 1, 3, WIDTH)),
    "vector": Case(backward, 0, 6, (WIDTH,)),
    "no rows": Case(backward, 4, 2, (0, WIDTH)),
    "bfloat16": Case(backward, 4, 2, dtype=torch.bfloat16),
    "float64": Case(backward, 4, 2, dtype=torch.float64),
    "deferred": Case(twice_deferred, 8, 4),
    "retained": Case(retained, 8, 4),
    "input without gradient": Case(without_input_gradient, 4, 2),
    "checked": Case(backward, 4, 2, options=CHECKED),
    "autocast": Case(in_autocast, 0, 6),
    "wider bucket": Case(backward, 0, 6, options=WIDER),
    "gradient of the input": Case(autograd_of_the_input, 0, 0),
    "backward to the input": Case(backward_to_the_input, 0, 0),
    "gradient of a weight": Case(autograd_of_a_weight, 4, 2),
    "hook": Case(watched, 3, 3),
}


def both_ways(names: list[str], strategies: list[int]) -> list[tuple[str, int, Seen, Seen]]:
    """For a worker: each case with the option off and on."""
    return [(name, s, see(CASES[name], s, False), see(CASES[name], s, True)) for name in names for s in strategies]


def _check(name: str, strategy: int, off: Seen, on: Seen) -> None:
    where = f"{name}, strategy {strategy}"
    case = CASES[name]
    assert (on.written, on.copied) == (case.written, case.copied), where
    assert (off.written, off.copied) == (0, case.written + case.copied), where
    assert torch.equal(off.output, on.output), where
    assert off.grads.keys() == on.grads.keys()
    for key, want in off.grads.items():
        got = on.grads[key]
        assert (got is None) == (want is None), f"{where}: {key}"
        if got is not None and want is not None and case.play in SUMS:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=f"{where}: {key}")
        elif got is not None and want is not None:
            assert torch.equal(got, want), f"{where}: {key}"


SUMS = (twice_deferred, retained)
"""What adds up in the product, not after it: the same sum, rounded otherwise."""


def test_numbers_are_those_of_the_copy(run_ranks: RunRanks) -> None:
    for jobs in ((sorted(CASES), [3]), (["deferred", "retained", "matrix"], [0, 1])):
        for of_rank in run_ranks(2, both_ways, *jobs):
            for found in of_rank:
                _check(*found)
    assert any(seen.grads["0.up.weight"] is not None for _, _, _, seen in of_rank)


def taken() -> dict[str, bool]:
    """Which forwards of a weight that hangs in its place are taken."""
    model = build(torch.float32)
    sharded, _ = fully_shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), zero_dp_strategy=0, gradient_accumulation_fusion=True
    )
    found = {}

    def ask(linear: FusedLinear, given: tuple[Tensor]) -> None:
        place, weight, bias, (tensor,) = linear._fused_target, linear.weight, linear.bias, given
        found["plain"] = place.takes(tensor, weight, bias)
        found["another weight"] = place.takes(tensor, nn.Parameter(weight.detach()), bias)
        found["a vector"] = place.takes(tensor[0], weight, bias)
        found["another dtype"] = place.takes(tensor.double(), weight, bias)
        found["a bias of another dtype"] = place.takes(tensor, weight, nn.Parameter(torch.zeros(12).double()))
        found["sparse"] = place.takes(tensor.detach().to_sparse(), weight, bias)
        torch.func.vmap(lambda _: found.update(transformed=place.takes(tensor, weight, bias)) or _)(tensor)
        with torch.no_grad():
            found["without gradients"] = place.takes(tensor, weight, bias)
        with torch.autograd.forward_ad.dual_level():
            found["forward mode"] = place.takes(tensor, weight, bias)
        with torch.autocast("cpu", torch.bfloat16):
            found["autocast"] = place.takes(tensor, weight, bias)
            found["autocast that is off"] = torch.autocast("cpu", enabled=False)(place.takes)(tensor, weight, bias)

    linear = sharded.module[0].up  # type: ignore[index, union-attr]
    linear.register_forward_pre_hook(ask)
    sharded(torch.randn(4, WIDTH))
    return found


def test_only_plain_products_are_taken(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(1, taken)
    assert len(found) == 11
    assert {name for name, is_taken in found.items() if is_taken} == {"plain", "autocast that is off"}


def second_derivatives() -> tuple[Seen, Seen]:
    case = Case(twice_differentiated, 0, 0)
    return see(case, 1, False), see(case, 1, True)


def test_a_second_derivative_takes_the_usual_way(run_ranks: RunRanks) -> None:
    ((off, on),) = run_ranks(1, second_derivatives)
    assert (on.written, on.copied) == (off.written, off.copied) == (0, 0)
    assert torch.equal(off.output, on.output)
    assert torch.equal(off.grads["input"], on.grads["input"])  # type: ignore[arg-type]
    assert bool((on.grads["input"] != 0).any())  # type: ignore[union-attr]


# ---- memory, and what the model looks like --------------------------------------------------------------------------


def large_allocations() -> dict[bool, int]:
    """How often the backward of a wide linear takes as much as its gradient, with the option off and on."""
    found = {}
    for fused in (False, True):
        model = nn.Sequential(nn.Linear(512, 512, bias=False))
        sharded, _ = fully_shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_accumulation_fusion=fused, zero_dp_strategy=2
        )
        for _ in range(2):
            loss = sharded(torch.ones(2, 512)).sum()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
                loss.backward()
        assert prof.profiler is not None
        events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
        found[fused] = sum(event.nbytes() == 512 * 512 * 4 for event in events if event.name() == "[memory]")
    return found


def test_the_gradient_has_no_tensor_of_its_own(run_ranks: RunRanks) -> None:
    (found,) = run_ranks(1, large_allocations)
    assert found == {False: 2, True: 1}  # the bucket is taken in every backward


def looks() -> list[Any]:
    model = nn.Sequential(Pair(), nn.Linear(WIDTH, 2))
    before = repr(model), list(model.state_dict())
    sharded, _ = fully_shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), fsdp_unit_modules=[Pair], gradient_accumulation_fusion=True
    )
    alike = (repr(sharded.module), list(sharded.module.state_dict())) == before
    linear = sharded.module[1]  # type: ignore[index]
    plain = copy.deepcopy(nn.Linear(2, 2))
    plain.__class__ = FusedLinear
    plain._fused_target = linear._fused_target  # type: ignore[assignment, union-attr]
    copied = copy.deepcopy(plain)
    return [alike, isinstance(linear, nn.Linear), type(linear) is FusedLinear, type(copied) is nn.Linear, vars(copied)]


def test_the_model_looks_as_before_and_copies_are_plain(run_ranks: RunRanks) -> None:
    ((*flags, attributes),) = run_ranks(1, looks)
    assert flags == [True] * 4
    assert "_fused_target" not in attributes


def warned_of() -> list[str]:
    model = nn.Sequential(nn.Bilinear(3, 3, 3))
    with pytest.warns(UserWarning, match="no effect") as caught:
        fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_accumulation_fusion=True)
    return [str(item.message) for item in caught]


def test_a_model_that_it_does_nothing_for_is_warned_of(run_ranks: RunRanks) -> None:
    ((message,),) = run_ranks(1, warned_of)
    assert message.startswith("gradient_accumulation_fusion=True has no effect on this model: no plain nn.Linear")


def bad_gradient() -> list[str]:
    model = build(torch.float32)
    sharded, _ = fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        report_nan_in_param_grad=True,
        gradient_accumulation_fusion=True,
    )
    try:
        (sharded(torch.ones(2, WIDTH)).sum() * torch.inf).backward()
    except Exception as error:  # noqa: BLE001
        return [type(error).__name__, str(error)]
    return []


def test_a_gradient_that_is_not_finite_is_found_in_the_bucket(run_ranks: RunRanks) -> None:
    ((kind, message),) = run_ranks(1, bad_gradient)
    assert kind == "NonFiniteGradientError"
    assert "0.up.weight" in message or "1.down.weight" in message
