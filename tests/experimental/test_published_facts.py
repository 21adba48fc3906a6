"""Facts that the published per-module API tests, and that no other file here shows (README.md lists all of them)."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.describe.model import memory_of
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.experimental import fully_shard_optimizer, microbatch
from megatron_fsdp.experimental.module import FsdpModule
from tests.experimental.test_fully_shard import (
    CASE,
    assert_trains,
    by_microbatch,
    connected,
    layers_and_root,
    linears,
    shard,
)
from tests.support.case import momentum
from tests.support.doors import assert_same, backward, build, train, wholes
from tests.support.on_ranks import on_ranks
from tests.support.zoo import Recomputed


class SavesAView(nn.Linear):
    """A linear whose backward reads a view of the weight that is no leaf."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by a transposed view."""
        self.storage = self.weight.untyped_storage()
        return x @ self.weight.view(-1).view(6, 6).t() + self.bias


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputed_units_rest_after_backward(reentrant: bool) -> None:
    net, reference = (build(partial(Recomputed, "units", reentrant)) for _ in range(2))
    context = shard(layers_and_root(net), "zero-3")
    for _ in range(2):
        backward(net, case=CASE)
        for module in (net, *net.layers):
            assert isinstance(module, FsdpModule)
            assert module.phase is FsdpModule.Phase.RESTING
        net.zero_grad()
    assert_trains(net, reference, context)


@pytest.mark.parametrize(("strategy", "sizes"), [("hsdp", (2, 2)), ("hfsdp", (2, 2)), ("hfsdp", (4, 1))])
@on_ranks(4)
def test_gradients_set_to_zero_or_none_train_alike(strategy: str, sizes: tuple[int, ...]) -> None:
    for set_to_none in (True, False):
        net, reference = linears(), linears()
        context = shard([*net, net], strategy, shape=sizes)
        optimizers = connected(net), momentum(reference)
        for each in optimizers:
            each.zero_grad = partial(each.zero_grad, set_to_none=set_to_none)  # type: ignore[method-assign]
        options: Any = {"steps": 3, "microbatches": 3, "case": CASE}
        found = train(net, optimizers[0], by_microbatch(context), **options)
        assert_same(found, train(reference, optimizers[1], alone=True, **options))


@on_ranks(2)
def test_two_backwards_of_one_microbatch_average_and_add_up() -> None:
    net = nn.Linear(1, 8, bias=False)
    context = shard([net], "zero-3")
    with microbatch(context, is_last=False):
        for _ in range(2):
            net(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    assert isinstance(net.weight.grad, DTensor)
    assert net.weight.grad.to_local().tolist() == [[3.0]] * 4  # twice the mean of 1 and 2


@on_ranks(2)
def test_a_step_installs_each_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = linears()
    context = shard([*net, net], "zero-1")
    optimizer = connected(net)
    installed: list[ParameterGroup] = []
    install = ParameterGroup.install
    monkeypatch.setattr(ParameterGroup, "install", lambda group: (installed.append(group), install(group)))
    for number in range(3):
        with microbatch(context, is_last=number == 2):
            net(torch.ones(1, 6)).sum().backward()
    assert installed == []
    optimizer.step()
    assert installed == list(context.engine.groups())


@pytest.mark.parametrize("connects", [True, False])  # a step of the published one fails without
@on_ranks(2)
def test_adam_trains_bfloat16_by_main_weights(connects: bool) -> None:
    net, reference = (linears().to(torch.bfloat16) for _ in range(2))
    reference = reference.float()
    shard([*net, net], "zero-3")
    other = torch.optim.Adam(reference.parameters(), lr=1e-2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    if connects:
        fully_shard_optimizer(optimizer)
    for step in range(5):
        data = CASE.make_batch(10, torch.Generator().manual_seed(step)).inputs.bfloat16().chunk(2)
        losses = [net(each).square().mean() for each in data]
        wanted = [reference(each.float()).square().mean() for each in data]
        torch.testing.assert_close(torch.stack(losses).float(), torch.stack(wanted), atol=3e-3, rtol=1e-2)
        losses[dist.get_rank()].backward()
        (sum(wanted) / 2).backward()  # type: ignore[operator]
        for each in (optimizer, other):
            each.step()
            each.zero_grad()


@on_ranks(2)
def test_a_saved_view_of_a_weight_outlives_the_forward() -> None:
    net, reference = (build(lambda: nn.Sequential(*(SavesAView(6, 6) for _ in range(4)))) for _ in range(2))
    context = shard([*net, net], "zero-3")
    for each in (net, reference):
        backward(each, case=CASE)
    assert_same(*(wholes(param.grad for param in each.parameters()) for each in (net, reference)))
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    context.reset()  # else the units used last stay unsharded for the next pass
    assert [module.storage.nbytes() for module in net] == [0] * 4


@on_ranks(2)
def test_orders_of_nested_units_and_sibling_roots_follow_each_other() -> None:
    first, last = linears(2), nn.Linear(6, 6)
    context = shard([first[0], first, last], "zero-3")
    assert list(context.forward_order) == [first, first[0], last]
    assert list(context.backward_order) == [last, first, first[0]]


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-3"])
@on_ranks(2)
def test_what_is_held_at_rest_is_the_part_of_this_rank(strategy: str) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    whole = 4 * 64 * 64
    half = whole if strategy == "ddp" else whole // 2
    context = shard([*net, net], strategy)
    optimizer = torch.optim.Adam(net.parameters())
    fully_shard_optimizer(optimizer)
    found = memory_of(context.engine)
    assert found.compute_weight_bytes == 4 * (half if strategy == "zero-3" else whole)
    assert found.main_weight_bytes == 0  # float32: a part of the compute weights
    assert found.main_grad_bytes == 4 * half
    for _ in range(2):
        gradients = [each.main for _, each in context.engine.groups_with_gradients()]
        assert sum(each.held_bytes for each in gradients) == 0
        net(torch.ones(2, 64)).sum().backward()
        assert sum(each.held_bytes for each in gradients) == 4 * half
        optimizer.step()
        optimizer.zero_grad()
    if strategy == "zero-3":  # two slots, two buckets and the scratch of an exchange, each of one layer
        assert 0 < memory_of(context.engine).transient_peak_bytes <= 5 * (4 * 64 * 64)
    assert sum(each["exp_avg"].to_local().numel() for each in optimizer.state.values()) == half


def test_the_tests_of_the_table_are_there() -> None:
    table = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", table))
    files = Path(__file__).parent.glob("test_*.py")
    defined = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))}
    assert len(named) > 35
    assert named <= defined
    assert sum(map(int, re.findall(r"\| (\d+) \|", table))) == 80
