"""A planted spike is reported on every rank, with unit, parameter, rank and value, and training goes on."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP, fully_shard_optimizer
from megatron_fsdp.errors import MegatronFSDPError
from tests.conftest import RunRanks
from tests.support.api_net import Layer, backward, batches, build, largest_difference, mesh, train, weights
from tests.support.expert_meshes import FLAT, experts_of
from tests.support.parallel_transformer import (
    ParallelBlock,
    build_dense,
    build_with_experts,
    make_tokens,
    mean_loss,
)
from tests.support.parity import fixed_seed
from tests.support.tensor_meshes import divide_tensors, tensor_parallel

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
HISTORY = 10
SPIKE = 1e4


def wrap(net: nn.Module, strategy: int, auto_sync: bool = True, check: bool = True, **index: Any) -> MegatronFSDP:
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=STRATEGIES[strategy], check_for_large_grads=check, check_for_nan_in_grad=check
    )
    return MegatronFSDP(
        net,
        FSDPDistributedIndex(**index or {"device_mesh": mesh(), "dp_shard_dim": "dp"}),
        config,
        fsdp_unit_modules=[unit for unit in (Layer, ParallelBlock) if any(type(m) is unit for m in net.modules())],
        sync_model_each_microbatch=auto_sync,
    )


@contextmanager
def spike(module: nn.Module, factor: float, *ranks: int) -> Iterator[None]:
    """On some ranks the gradient of a module's output is multiplied, and so are those of all that comes before."""

    def multiply(_module: Any, _args: Any, output: Tensor) -> Tensor:
        if dist.get_rank() in ranks:
            output.register_hook(lambda grad: grad * factor)
        return output

    handle = module.register_forward_hook(multiply)
    try:
        yield
    finally:
        handle.remove()


def raised(model: MegatronFSDP, number: int) -> str:
    try:
        backward(model, next(batches(1, number)))
    except MegatronFSDPError as error:
        return f"{type(error).__name__} {isinstance(error, ValueError)}: {error}"
    return ""


# ---- values, recovery ------------------------------------------------------------------------------------------------


def report_and_go_on(strategy: int, auto_sync: bool) -> tuple[str, str, float]:
    """The messages of two spikes, and the distance to one process that never saw them."""
    net = build()
    model = wrap(net, strategy, auto_sync)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    train(model, optimizer, HISTORY)
    with spike(net.layers[1].linear, SPIKE, 1):  # type: ignore[arg-type, union-attr]
        first = raised(model, HISTORY)
        optimizer.zero_grad()
        second = raised(model, HISTORY)
    optimizer.zero_grad()
    train(model, optimizer, 2, first=HISTORY)
    reference = build()
    train(reference, torch.optim.SGD(reference.parameters(), lr=1e-2), HISTORY + 2)
    return first, second, largest_difference(weights(model), weights(reference))


def expected_values() -> tuple[float, float]:
    """Of layers.1.linear.weight: the planted value on rank 1, and the largest of both ranks before."""
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    before, of_rank = 0.0, 0.0
    for number, (inputs, targets) in enumerate(batches(HISTORY + 1)):
        for rank in range(2):
            optimizer.zero_grad()
            backward(net, (inputs.chunk(2)[rank], targets.chunk(2)[rank]))
            grad = net.layers[1].linear.weight.grad  # type: ignore[union-attr]
            assert isinstance(grad, Tensor)
            of_rank = grad.abs().max().item()
            before = max(before, of_rank) if number < HISTORY else before
        optimizer.zero_grad()
        backward(net, (inputs, targets))
        optimizer.step()
    return SPIKE * of_rank, before


@pytest.mark.full(short=["1-False", "3-False"])
@pytest.mark.parametrize(("strategy", "auto_sync"), [(0, True), (1, False), (2, True), (3, False)])
def test_every_rank_names_unit_parameter_rank_and_value_and_training_goes_on(
    strategy: int, auto_sync: bool, run_ranks: RunRanks
) -> None:
    outcomes = run_ranks(2, report_and_go_on, strategy, auto_sync)
    assert outcomes[0] == outcomes[1]
    first, second, difference = outcomes[0]
    assert first == second  # the spike is not remembered
    assert first.startswith("LargeGradientError True: the gradients of 4 parameters are unexpectedly large")
    assert "layers.0.linear.bias (layers.0) on rank [1] has" in first
    assert "head." not in first  # the gradients behind the spike are as ever
    told = re.search(
        r"layers.1.linear.weight \(layers.1\) on rank \[1\] has (\S+), and had at most (\S+) in 10 ", first
    )
    assert told is not None
    assert [float(value) for value in told.groups()] == pytest.approx(expected_values(), rel=1e-3)
    assert difference <= 2e-6


def unchecked() -> tuple[str, float]:
    """Without the switch the spike passes; with it and no spike, gradients are what they are."""
    net = build()
    model = wrap(net, 3, check=False)
    for number in range(HISTORY):
        raised(model, number)
    with spike(net.layers[1], SPIKE, 1):
        passed = raised(model, HISTORY)
    checked = wrap(build(), 3)
    train(checked, fully_shard_optimizer(torch.optim.AdamW(checked.parameters(), lr=1e-2)), HISTORY + 3)
    reference = build()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), HISTORY + 3)
    return passed, largest_difference(weights(checked), weights(reference))


def test_without_the_switch_nothing_is_raised_and_with_it_good_gradients_do_not_change(run_ranks: RunRanks) -> None:
    for passed, difference in run_ranks(2, unchecked):
        assert passed == ""
        assert difference <= 5e-6


# ---- what only some ranks see ----------------------------------------------------------------------------------------


def microbatches() -> tuple[str, str, str]:
    """A spike in a backward that reduces nothing, one on two of three ranks, and NaN and a spike at a time."""
    net = build()
    model = wrap(net, 2)
    with model.no_sync():
        for number in range(HISTORY):
            raised(model, number)
        with spike(net.layers[0].linear, SPIKE, 2):  # type: ignore[arg-type, union-attr]
            deferred = raised(model, HISTORY)
    model.zero_grad()
    with spike(net.head, SPIKE, 0, 2):
        several = raised(model, HISTORY)
    model.zero_grad()
    with spike(net.layers[0], float("nan"), 0), spike(net.layers[1], SPIKE, 1):
        both = raised(model, HISTORY)
    model.zero_grad()
    assert raised(model, HISTORY) == ""
    return deferred, several, both


def test_deferred_microbatches_several_ranks_and_nan_at_the_same_time(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(3, microbatches)
    assert outcomes == [outcomes[0]] * 3
    deferred, several, both = outcomes[0]
    assert deferred.startswith("LargeGradientError True: the gradients of 2 parameters")
    assert "layers.0.linear.weight (layers.0) on rank [2] has" in deferred
    assert "head.weight (root) on rank [0, 2] has" in several
    assert both.startswith("NonFiniteGradientError True: ")
    assert "layers.0.linear.bias (layers.0) on rank [0]" in both


class OneSided(nn.Module):
    """A parameter in the root that only the last rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.extra = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.extra(x) if dist.get_rank() == dist.get_world_size() - 1 else x


def used_on_one_rank(strategy: int) -> str:
    with fixed_seed(0):
        net = OneSided()
    model = wrap(net, strategy)
    for _ in range(HISTORY):
        model(torch.ones(2, 5)).square().mean().backward()
    with spike(net.extra, SPIKE, 1):
        try:
            model(torch.ones(2, 5)).square().mean().backward()
        except MegatronFSDPError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("strategy", [0, 3])
def test_a_parameter_that_one_rank_uses_is_judged_by_its_own_backwards(strategy: int, run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, used_on_one_rank, strategy)
    assert first == second
    assert re.search(r"extra.weight \(root\) on rank \[1\] has \S+, and had at most \S+ in 10 backwards", first)


TENSORS = tensor_parallel(divide_tensors)
EXPERTS = experts_of(FLAT)


def divided(kind: str) -> str:
    """A spike on rank 2 of 4: in its part of a divided layer, or in an expert that half of the ranks hold."""
    arrangement, make = (TENSORS, build_dense) if kind == "tensors" else (EXPERTS, build_with_experts)
    with fixed_seed(0):
        net = make()
    arrangement.place(net)
    model = wrap(net, 3, **arrangement.arguments())
    block = next(module for module in net.modules() if isinstance(module, ParallelBlock))
    source = block.get_submodule("attention.q" if kind == "tensors" else "mlp.experts")
    batch = arrangement.part(make_tokens(12, torch.Generator().manual_seed(0)))

    def step() -> str:
        try:
            mean_loss(model, batch).backward()
        except MegatronFSDPError as error:
            return str(error)
        model.zero_grad()
        return ""

    said = {step() for _ in range(HISTORY)}
    with spike(source, SPIKE, 2):
        return f"{said} {step()}"


@pytest.mark.full(short=["experts"])
@pytest.mark.parametrize("kind", ["tensors", "experts"])
def test_divided_tensors_and_experts_of_one_rank_stop_all(kind: str, run_ranks: RunRanks) -> None:
    outcomes = run_ranks(4, divided, kind)
    assert outcomes == [outcomes[0]] * 4
    assert outcomes[0].startswith("{''} the gradients of ")
    name = "attention.q.weight" if kind == "tensors" else "mlp.experts.down"
    assert f"blocks.0.{name} (blocks.0) on rank [2] has" in outcomes[0]


# ---- a backward that fails -------------------------------------------------------------------------------------------


def fails_half_way(factor: float) -> tuple[str, str]:
    """A spike or NaN in a backward that fails after it on every rank; then what good backwards and a spike raise."""
    net = build()
    model = wrap(net, 3)
    for number in range(HISTORY):
        raised(model, number)

    def fail(_module: Any, _args: Any, output: Tensor) -> Tensor:
        output.register_hook(lambda _grad: 1 / 0)  # type: ignore[arg-type, return-value]
        return output

    handle = net.layers[0].register_forward_hook(fail)
    with spike(net.layers[1].linear, factor, 1), pytest.raises(ZeroDivisionError):  # type: ignore[arg-type, union-attr]
        raised(model, HISTORY)
    handle.remove()
    model.reset()
    model.zero_grad()
    after = raised(model, HISTORY)
    with spike(net.layers[1].linear, SPIKE, 0):  # type: ignore[arg-type, union-attr]
        return after, raised(model, HISTORY)


@pytest.mark.parametrize("factor", [SPIKE, float("nan")])
def test_what_a_failed_backward_saw_is_dropped_by_reset(factor: float, run_ranks: RunRanks) -> None:
    for after, large in run_ranks(2, fails_half_way, factor):
        assert after == ""
        assert "layers.1.linear.weight (layers.1) on rank [0] has" in large
        assert "in 11 backwards" in large
