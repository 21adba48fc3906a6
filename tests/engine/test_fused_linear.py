"""Weight gradients that linears write straight into the bucket: the same numbers, and no tensor of their own."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.engine import engine
from megatron_fsdp.engine.fused_linear import FusedLinear
from megatron_fsdp.engine.gradients import GradientBuffers
from megatron_fsdp.errors import NonFiniteGradientError
from tests.conftest import RunRanks
from tests.support.models import Batch, ModelCase
from tests.support.on_ranks import on_ranks
from tests.support.sharded_run import DdpSetting, Run, Scenario, Setting, check_jobs, check_strategies, ddp
from tests.support.usage_models import Recomputed, vector_case

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
    each_by_itself = mock.patch.object(engine, "direct_hook", lambda _gradient, take: take)
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


def _check(name: str, strategy: int) -> None:
    case, where = CASES[name], f"{name}, strategy {strategy}"
    off, on = (see(case, strategy, fused) for fused in (False, True))
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


@on_ranks(2)
def test_numbers_are_those_of_the_copy() -> None:
    for name in CASES:
        _check(name, 3)
    for name in ("deferred", "retained", "matrix"):
        for strategy in (0, 1):
            _check(name, strategy)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def shard(model: nn.Module, fused: bool = True, **options: Any) -> nn.Module:
    return fully_shard(model, sgd(model), gradient_accumulation_fusion=fused, **options)[0]


@on_ranks(1)
def test_only_plain_products_are_taken() -> None:
    sharded = shard(build(torch.float32), zero_dp_strategy=0)
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

    sharded.module[0].up.register_forward_pre_hook(ask)
    sharded(torch.randn(4, WIDTH))
    assert len(found) == 11
    assert {name for name, is_taken in found.items() if is_taken} == {"plain", "autocast that is off"}


@on_ranks(1)
def test_a_second_derivative_takes_the_usual_way() -> None:
    off, on = (see(Case(twice_differentiated, 0, 0), 1, fused) for fused in (False, True))
    assert (on.written, on.copied) == (off.written, off.copied) == (0, 0)
    assert torch.equal(off.output, on.output)
    assert torch.equal(off.grads["input"], on.grads["input"])
    assert (on.grads["input"] != 0).any()


# ---- memory, and what the model looks like ---------------------------------------------------------------------------


@pytest.mark.parametrize(("fused", "expected"), [(False, 2), (True, 1)])  # the bucket is taken in every backward
@on_ranks(1)
def test_the_gradient_has_no_tensor_of_its_own(fused: bool, expected: int) -> None:
    sharded = shard(nn.Sequential(nn.Linear(512, 512, bias=False)), fused, zero_dp_strategy=2)
    for _ in range(2):
        loss = sharded(torch.ones(2, 512)).sum()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
            loss.backward()
    events = prof.profiler.kineto_results.events()
    assert sum(event.nbytes() == 512 * 512 * 4 for event in events if event.name() == "[memory]") == expected


@on_ranks(1)
def test_the_model_looks_as_before_and_copies_are_plain() -> None:
    model = nn.Sequential(Pair(), nn.Linear(WIDTH, 2))
    before = repr(model), list(model.state_dict())
    sharded = shard(model, fsdp_unit_modules=[Pair])
    assert (repr(sharded.module), list(sharded.module.state_dict())) == before
    linear = sharded.module[1]
    assert type(linear) is FusedLinear
    assert isinstance(linear, nn.Linear)
    fused = nn.Linear(2, 2)
    fused.__class__ = FusedLinear
    fused._fused_target = linear._fused_target
    copied = copy.deepcopy(fused)
    assert type(copied) is nn.Linear
    assert "_fused_target" not in vars(copied)


@on_ranks(1)
def test_a_model_that_it_does_nothing_for_is_warned_of() -> None:
    said = "^gradient_accumulation_fusion=True has no effect on this model: no plain nn.Linear"
    with pytest.warns(UserWarning, match=said):
        shard(nn.Sequential(nn.Bilinear(3, 3, 3)))


@on_ranks(1)
def test_a_gradient_that_is_not_finite_is_found_in_the_bucket() -> None:
    sharded = shard(build(torch.float32), report_nan_in_param_grad=True)
    with pytest.raises(NonFiniteGradientError, match=r"0\.up\.weight|1\.down\.weight"):
        (sharded(torch.ones(2, WIDTH)).sum() * torch.inf).backward()


# ---- against one process ---------------------------------------------------------------------------------------------


def _settings(*strategies: int) -> list[Setting]:
    return [Setting(strategy, options=(("gradient_accumulation_fusion", True),)) for strategy in strategies]


def steps_of_all_kinds(run: Run) -> None:
    """A plain step, one with a deferred microbatch, and one of two forwards with a backward each and together."""
    run.train(0)
    with run.no_sync():
        run.loss(1).backward()
    run.train(2)
    losses = [run.loss(3), run.loss(4), run.loss(5)]
    (losses[0] + losses[1]).backward()
    losses[2].backward()
    run.step()


class Usual(nn.Module):
    """What a block may do with linears: none of these is without a weight gradient.

    A tied pair, a linear that is called twice, a weight that is also read by itself, a frozen one, one without a bias,
    one behind a frozen input, one that is never called, one that two calls of three skip, a subclass, one of one row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.frozen_weight = nn.Linear(WIDTH, WIDTH)
        self.frozen_weight.weight.requires_grad_(False)
        self.tied = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.tied[1].weight = self.tied[0].weight
        self.never = nn.Linear(WIDTH, 3)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.own = OwnLinear(WIDTH, WIDTH)
        self.row = nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        y = y + self.read(x.detach()) + 0.1 * self.read.weight.square().sum()
        y = y + self.tied[1](torch.tanh(self.tied[0](self.frozen(x)))) + self.frozen_weight(y)
        self.calls += 1
        if self.calls % 3 == 0:
            y = y + self.sometimes(x.transpose(0, 1)).transpose(0, 1)  # not contiguous
        return x + self.own(y) * self.row(y)


class OwnLinear(nn.Linear):
    """A subclass, whose forward may do anything."""


class Matrices(nn.Module):
    """Blocks between two linears, on samples of a (3, WIDTH) matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Usual() for _ in range(2))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.mean(1))


def _matrices(samples: int, generator: torch.Generator) -> Batch:
    return Batch(torch.randn(samples, 3, 5, generator=generator), torch.randn(samples, 2, generator=generator))


def _squares(module: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(module(batch.inputs), batch.targets)


MATRICES = ModelCase(Matrices, _matrices, _squares, (Usual,))


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_training_equals_one_process(run_ranks: RunRanks, num_ranks: int) -> None:
    check_strategies(run_ranks, num_ranks, Scenario(steps_of_all_kinds, MATRICES), _settings(0, 1, 2, 3))
    recomputed = vector_case(partial(Recomputed, "pairs", True))
    check_strategies(run_ranks, num_ranks, Scenario(steps_of_all_kinds, recomputed), _settings(2, 3))


BUCKETS: list[DdpSetting] = [
    ddp(gradient_accumulation_fusion=True, bucket_size=90, **fields)
    for fields in (
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True},
        {"overlap_grad_reduce": False, "use_distributed_optimizer": True, "average_in_collective": True},
        {"overlap_grad_reduce": True, "gradient_reduce_div_fusion": False},
    )
]


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_buckets_equal_one_process(run_ranks: RunRanks, num_ranks: int) -> None:
    plain = vector_case(partial(Recomputed, "pairs", False))
    jobs = [(Scenario(steps_of_all_kinds, MATRICES), setting) for setting in BUCKETS]
    check_jobs(run_ranks, num_ranks, [*jobs, (Scenario(steps_of_all_kinds, plain), BUCKETS[1])])
