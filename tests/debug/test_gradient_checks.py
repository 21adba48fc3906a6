"""NaN, infinity and unexpectedly large gradients are reported on every rank by name, and training can go on."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp.debug.gradient_checks import LargeGradientCheck
from megatron_fsdp.errors import LargeGradientError, NonFiniteGradientError
from tests.support.api_net import Layer, backward, batches, build, largest_difference, mesh, own_part, train, weights
from tests.support.counting import OpCounts
from tests.support.experts import FLAT, build_with_experts, experts_of
from tests.support.on_ranks import first_rank_warns, fixed_seed, on_ranks, same_on_ranks
from tests.support.zoo import Block, make_token_batch, token_loss

pytestmark = pytest.mark.unmerged

CPU = torch.device("cpu")


# ---- what counts as large, by values on one process ------------------------------------------------------------------


def make(factor: float = 100.0, history: int = 3) -> LargeGradientCheck:
    return LargeGradientCheck({"a": "bucket 2", "b": ""}, [None], CPU, factor, history)


def record(check: LargeGradientCheck, **gradients: float) -> str:
    """One backward with the given largest magnitudes; what it raised."""
    check.begin()
    for name, value in gradients.items():
        check.record(name, torch.tensor([0.0, -value, value / 2]))
    try:
        check.conclude()
    except LargeGradientError as error:
        return str(error)
    return ""


def test_the_message_names_bucket_parameter_value_and_the_largest_before() -> None:
    check = make()
    assert [record(check, a=value, b=1.0) for value in (1.0, 2.5, 0.5)] == [""] * 3
    assert record(check, a=250.0, b=1.0) == ""  # 100 times is not above 100 times
    assert record(check, a=25001.0, b=7.0) == (
        "the gradients of 1 parameters are unexpectedly large before reduction, more than 100 times the largest "
        "before: a (bucket 2) on rank [0] has 2.5e+04, and had at most 250 in 4 backwards (global ranks, largest "
        "magnitudes); look at loss and data, then call zero_grad and go on or stop"
    )
    both = record(check, a=1e6, b=1e6)
    assert "of 2 parameters" in both
    assert both.index("b on rank") < both.index("a (bucket 2)")  # b grew more
    assert [record(make(), a=1e-30 * 50.0**step) for step in range(38)] == [""] * 38  # small factors are no alarm


@given(
    st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, 8.0, 64.0, 512.0, math.inf, math.nan])] * 2), max_size=20),
    st.integers(1, 4),
)
def test_only_what_was_not_large_is_remembered(sequence: list[tuple[float, float]], history: int) -> None:
    check = make(factor=10.0, history=history)
    before: dict[str, list[float]] = {"a": [], "b": []}
    for values in sequence:
        found = dict(zip("ab", values, strict=True))
        large = {
            name
            for name, value in found.items()
            if len(before[name]) >= history and value > 10 * max(before[name])  # False for NaN
        }
        said = record(check, **found)
        assert {name for name in "ab" if f"{name} " in said.partition("before: ")[2].partition(" (global")[0]} == large
        for name, value in found.items():
            if not large and 0.0 < value < math.inf:
                before[name].append(value)


def test_the_host_waits_for_the_device_once_when_backward_ends() -> None:
    check = make()
    with OpCounts() as looking:
        check.begin()
        for name in "ab":
            check.record(name, torch.ones(3))
    with OpCounts() as concluding:
        check.conclude()
    assert looking.ops["linalg_vector_norm"] == 2
    assert looking.ops["_local_scalar_dense"] == 0
    assert concluding.ops["_local_scalar_dense"] + concluding.ops["is_nonzero"] == 1


# ---- on ranks --------------------------------------------------------------------------------------------------------

HISTORY = 10
SPIKE = 1e4
NAN, INF = math.nan, math.inf


def wrap(net: nn.Module, strategy: int, **arguments: Any) -> MegatronFSDP:
    return fully_shard_model(net, mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, **arguments)


def wrap_checked(net: nn.Module, strategy: int, auto_sync: bool = True, **index: Any) -> MegatronFSDP:
    """With both checks on."""
    names = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=names[strategy], check_for_large_grads=True, check_for_nan_in_grad=True
    )
    return MegatronFSDP(
        net,
        FSDPDistributedIndex(**index or {"device_mesh": mesh(), "dp_shard_dim": "dp"}),
        config,
        fsdp_unit_modules=[unit for unit in (Layer, Block) if any(type(m) is unit for m in net.modules())],
        sync_model_each_microbatch=auto_sync,
    )


@contextmanager
def spoilt(module: nn.Module, factor: float, *ranks: int) -> Iterator[None]:
    """On some ranks the gradient of a module's output is multiplied, and so are those of all that comes before."""

    def multiply(_module: Any, _args: Any, output: Tensor) -> None:
        if dist.get_rank() in ranks:
            output.register_hook(lambda grad: grad * factor)

    handle = module.register_forward_hook(multiply)
    try:
        yield
    finally:
        handle.remove()


def raised(model: MegatronFSDP, number: int = 0) -> str:
    """What a backward raised on all ranks alike; gradients are cleared."""
    message = ""
    try:
        backward(model, next(batches(1, number)))
    except ValueError as error:
        message = f"{type(error).__name__}: {error}"
    model.zero_grad()
    return same_on_ranks(message)


@pytest.mark.full(short=["0-nan-True", "3-10000.0-False"])
@pytest.mark.parametrize(
    ("strategy", "factor", "auto_sync"), [(0, NAN, True), (1, INF, False), (2, SPIKE, True), (3, SPIKE, False)]
)
@on_ranks(2)
def test_every_rank_names_parameter_unit_and_rank_and_training_goes_on(
    strategy: int, factor: float, auto_sync: bool
) -> None:
    net, reference = build(), build()
    model = wrap_checked(net, strategy, auto_sync)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    other = torch.optim.SGD(reference.parameters(), lr=1e-2)
    train(model, optimizer, HISTORY)
    before = 0.0  # over the backwards of both ranks
    for batch in batches(HISTORY):
        other.zero_grad()
        backward(reference, tuple(own_part(each) for each in batch))
        largest = reference.layers[1].linear.weight.grad.abs().max()
        before = max(before, *(same_value(largest, of_rank=rank) for rank in range(2)))
        other.zero_grad()
        backward(reference, batch)
        other.step()
    with spoilt(net.layers[1].linear, factor, 1):
        message = raised(model, HISTORY)
        assert raised(model, HISTORY) == message  # a spike is not remembered
    other.zero_grad()
    backward(reference, tuple(own_part(each) for each in next(batches(1, HISTORY))))
    value = factor * same_value(reference.layers[1].linear.weight.grad.abs().max(), of_rank=1)
    if factor == SPIKE:
        assert message.startswith("LargeGradientError: the gradients of 4 parameters are unexpectedly large")
        told = re.search(
            r"layers.1.linear.weight \(layers.1\) on rank \[1\] has (\S+), and had at most (\S+) in 10 ", message
        )
        assert told is not None
        assert float(told[1]) == pytest.approx(value, rel=1e-3)
        assert float(told[2]) == pytest.approx(before, rel=1e-3)
    else:
        assert message.startswith("NonFiniteGradientError: the gradients of 4 parameters hold NaN or infinity before ")
    assert "layers.0.linear.bias (layers.0) on rank [1]" in message
    assert "head." not in message  # the gradients behind the bad one are good
    other.zero_grad()
    train(model, optimizer, 2, first=HISTORY)
    train(reference, other, 2, first=HISTORY)
    assert largest_difference(weights(model), weights(reference)) <= 2e-6


def same_value(tensor: Tensor, of_rank: int) -> float:
    value = tensor.clone()
    dist.broadcast(value, of_rank)
    return value.item()


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_the_switches_turn_it_on_and_change_no_good_gradient(strategy: int) -> None:
    net = build()
    plain = wrap(net, strategy)
    for number in range(HISTORY):
        assert raised(plain, number) == ""
    with spoilt(net.layers[1], SPIKE, 1):
        assert raised(plain, HISTORY) == ""
    plain.zero_grad()
    with spoilt(net.layers[1], NAN, 1):
        backward(plain, next(batches(1)))
    assert plain.full_gradients()["layers.1.linear.bias"].isnan().any()
    for switch in ({"report_nan_in_param_grad": True}, {"check_for_nan_in_grad": True}):
        net = build()
        with first_rank_warns("check_for_nan", FutureWarning) if "check_for_nan_in_grad" in switch else nullcontext():
            model = wrap(net, strategy, **switch)
        train(model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2)), 3)
        reference = build()
        train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), 3)
        assert largest_difference(weights(model), weights(reference)) <= 2e-6
        with spoilt(net.layers[1], NAN, 0):
            assert "layers.1.linear.bias (layers.1) on rank [0]" in raised(model)


@pytest.mark.full(short=["2-False"])
@pytest.mark.parametrize(("strategy", "bf16_grads"), [(1, True), (2, False)])
@on_ranks(3)
def test_deferred_microbatches_frozen_parameters_and_several_ranks_are_reported(
    strategy: int, bf16_grads: bool
) -> None:
    net, reference = build(), build()
    net.layers[0].linear.weight.requires_grad_(False)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16 if bf16_grads else None)
    model = wrap(net, strategy, mixed_precision_policy=policy, report_nan_in_param_grad=True)
    with model.no_sync(), spoilt(net.layers[1], INF, 1):
        assert "layers.1.linear.bias (layers.1) on rank [1]" in raised(model)
    with spoilt(net.layers[1], NAN, 1, 2):
        several = raised(model)
    assert "layers.1.linear.bias (layers.1) on rank [1, 2]" in several
    assert "layers.0.linear.bias (layers.0) on rank [1, 2]" in several
    assert "layers.0.linear.weight" not in several
    with model.no_sync():
        backward(model, next(batches(1)))
    backward(model, next(batches(1, 1)))
    for batch in batches(2):
        backward(reference, batch)
    wanted = {name: p.grad for name, p in reference.named_parameters() if name != "layers.0.linear.weight"}
    shown = {name: grad for name, grad in model.full_gradients().items() if grad is not None}
    assert largest_difference(shown, wanted) <= (
        5e-2 if bf16_grads else 2e-6
    )  # bfloat16 keeps 8 bits of values of about 2


@on_ranks(4)
def test_experts_of_one_rank_stop_all() -> None:
    """A spike on rank 2 of 4, in an expert that half of the ranks hold."""
    arrangement = experts_of(FLAT)
    with fixed_seed(0):
        net = build_with_experts()
    arrangement.place(net)
    model = wrap_checked(net, 3, **arrangement.arguments())
    block = next(module for module in net.modules() if isinstance(module, Block))
    batch = arrangement.part(make_token_batch(12, torch.Generator().manual_seed(0)))
    for _ in range(HISTORY):
        token_loss(model, batch).backward()
        model.zero_grad()
    with spoilt(block.get_submodule("mlp.experts"), SPIKE, 2), pytest.raises(LargeGradientError) as caught:
        token_loss(model, batch).backward()
    assert "blocks.0.mlp.experts.down (blocks.0) on rank [2] has" in same_on_ranks(str(caught.value))


@on_ranks(2)
def test_what_a_failed_backward_saw_is_dropped_by_reset() -> None:
    net = build()
    model = wrap_checked(net, 3)
    for number in range(HISTORY):
        raised(model, number)

    def fail(_module: Any, _args: Any, output: Tensor) -> None:
        output.register_hook(lambda _grad: 1 / 0)

    handle = net.layers[0].register_forward_hook(fail)
    with spoilt(net.layers[1].linear, SPIKE, 1), pytest.raises(ZeroDivisionError):
        raised(model, HISTORY)
    handle.remove()
    model.reset()
    model.zero_grad()
    assert raised(model, HISTORY) == ""
    with spoilt(net.layers[1].linear, SPIKE, 0):
        large = raised(model, HISTORY)
    assert "layers.1.linear.weight (layers.1) on rank [0] has" in large
    assert "in 11 backwards" in large


# ---- infinity that sums and casts make of finite gradients -----------------------------------------------------------

HALF_SUM = ({}, torch.float16, 6e4, 2)  # two finite microbatches, and their sum is above the largest float16
HALF_WIRE = ({"megatron_fsdp_grad_comm_dtype": "fp16"}, torch.float32, 1e6, 1)
HALF_MAIN = ({"megatron_fsdp_main_grads_dtype": "fp16"}, torch.float32, 1e6, 1)
NAMED = "the gradients of 1 parameters hold NaN or infinity before reduction: 1.weight (bucket 1) on rank [1] (global"


class TwoWeights:
    """A model of two weights, of which the second's gradient is the input of the batch."""

    def __init__(self, dtype: torch.dtype, by_hand: bool = False, **fields: Any) -> None:
        net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).to(dtype)
        with torch.no_grad():
            net[0].weight.fill_(1.0)
            net[1].weight.fill_(2.0**-13)  # the gradient of the first weight stays small
        self.model = DistributedDataParallel(DistributedDataParallelConfig(check_for_nan_in_grad=True, **fields), net)
        self.dtype, self.by_hand = dtype, by_hand

    def step(self, *values: float) -> str:
        """Gradients of a few microbatches; where what was raised on all ranks, and what."""
        where = message = ""
        self.model.zero_grad()
        try:
            for number, value in enumerate(values):
                where = f"microbatch {number}"
                deferring = self.by_hand or number < len(values) - 1
                with self.model.no_sync() if deferring else nullcontext():
                    self.model(torch.full((1, 1), value, dtype=self.dtype)).sum().backward()
            where = "sync"
            if self.by_hand:
                self.model.finish_grad_sync()
        except NonFiniteGradientError as error:
            message = f"{where}: {error}"
        return same_on_ranks(message)

    @property
    def gradient(self) -> float:
        return self.model.full_gradients()["1.weight"].float().item()


@pytest.mark.parametrize(
    ("case", "distributed", "by_hand"),
    [(HALF_SUM, False, True), (HALF_WIRE, True, False), (HALF_MAIN, True, True)],
    ids=["sum", "wire", "main gradients"],
)
@on_ranks(2)
def test_infinity_that_only_travels_is_named_on_every_rank(case: Any, distributed: bool, by_hand: bool) -> None:
    fields, dtype, value, microbatches = case
    two = TwoWeights(dtype, by_hand, use_distributed_optimizer=distributed, **fields)
    assert (two.step(*[2.0] * microbatches), two.gradient) == ("", 2.0 * microbatches)
    bad = two.step(*[value if dist.get_rank() == 1 else 2.0] * microbatches)
    assert bad.startswith(f"{'sync' if by_hand else f'microbatch {microbatches - 1}'}: {NAMED}")
    assert (two.step(*[4.0] * microbatches), two.gradient) == ("", 4.0 * microbatches)


@pytest.mark.parametrize("delays", [False, True])
@on_ranks(2)
def test_sums_of_earlier_backwards_are_reported_by_the_backward_that_reduces_them(delays: bool) -> None:
    two = TwoWeights(torch.float16, bucket_size=1, overlap_grad_reduce=True, delay_wgrad_compute=delays)
    large = 6e4 if dist.get_rank() == 1 else 1.0
    assert "1.weight (bucket 2) on rank [1] (global" in two.step(large, large, 0.0)
    assert math.isinf(two.gradient)  # the gradients are what they are, for those who go on
    assert two.step(1.0) == ""
