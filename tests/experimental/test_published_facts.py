"""Facts that the published per-module API tests, and that no other file here shows (README.md lists all of them)."""

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron_fsdp.describe.model import memory_of
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.experimental import fully_shard, fully_shard_context, fully_shard_optimizer, microbatch
from megatron_fsdp.experimental.module import FsdpContext, FsdpModule
from tests.experimental.test_fully_shard import STRATEGIES, batches, mesh_of, placements
from tests.support.on_ranks import on_ranks


class Recomputed(nn.Sequential):
    """Layers whose activations are computed again in backward."""

    def __init__(self, *layers: nn.Module, reentrant: bool) -> None:
        super().__init__(*layers)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Run all, each inside of a checkpoint."""
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class SavesAView(nn.Linear):
    """A linear whose backward reads a view of the weight that is no leaf."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by a transposed view."""
        self.storage = self.weight.untyped_storage()
        return x @ self.weight.view(-1).view(6, 6).t() + self.bias


def shard(net: nn.Module, strategy: str, *units: nn.Module, sizes: tuple[int, ...] = ()) -> FsdpContext:
    names = ("outer", "inner")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names) if sizes else mesh_of(len(STRATEGIES[strategy][0]))
    with fully_shard_context("cpu") as context:
        for module in (*units, net):
            fully_shard(module, mesh, placements(strategy))
    return context


def layers(count: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))


def whole_batch(reference: nn.Module, data: Tensor) -> None:
    """Add the gradient of the mean over ranks of the sum over microbatches."""
    for each in data.flatten(0, 1):
        (reference(each).square().mean() / data.shape[1]).backward()


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputed_units_rest_after_backward(reentrant: bool) -> None:
    net = Recomputed(*layers(), reentrant=reentrant)
    reference = copy.deepcopy(net)
    shard(net, "zero-3", *net)
    for step in range(2):
        data = batches(1, step)
        net(data[0, dist.get_rank()].requires_grad_()).square().mean().backward()
        whole_batch(reference, data.detach().requires_grad_())
        for module in (net, *net):
            assert isinstance(module, FsdpModule)
            assert module.phase is FsdpModule.Phase.RESTING
        for param, wanted in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize(("strategy", "sizes"), [("hsdp", (2, 2)), ("hfsdp", (2, 2)), ("hfsdp", (4, 1))])
@on_ranks(4)
def test_gradients_set_to_zero_or_none_train_alike(strategy: str, sizes: tuple[int, ...]) -> None:
    for set_to_none in (True, False):
        net, reference = layers(), layers()
        context = shard(net, strategy, *net, sizes=sizes)
        both = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (net, reference)]
        fully_shard_optimizer(both[0])
        for step in range(3):
            data = batches(3, step)
            for number in range(3):
                with microbatch(context, is_last=number == 2):
                    net(data[number, dist.get_rank()]).square().mean().backward()
            whole_batch(reference, data)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        for param, wanted in zip(net.parameters(), reference.parameters(), strict=True):
            assert isinstance(param, DTensor)
            torch.testing.assert_close(param.full_tensor(), wanted)


@on_ranks(2)
def test_two_backwards_of_one_microbatch_average_and_add_up() -> None:
    net = nn.Linear(1, 8, bias=False)
    context = shard(net, "zero-3")
    with microbatch(context, is_last=False):
        for _ in range(2):
            net(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
    assert isinstance(net.weight.grad, DTensor)
    assert net.weight.grad.to_local().tolist() == [[3.0]] * 4  # twice the mean of 1 and 2


@on_ranks(2)
def test_a_step_installs_each_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = layers()
    context = shard(net, "zero-1", *net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    fully_shard_optimizer(optimizer)
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
    net, reference = (layers().to(torch.bfloat16) for _ in range(2))
    reference = reference.float()
    shard(net, "zero-3", *net)
    other = torch.optim.Adam(reference.parameters(), lr=1e-2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    if connects:
        fully_shard_optimizer(optimizer)
    for step in range(5):
        data = batches(1, step).bfloat16()
        losses = [net(each).square().mean() for each in data[0]]
        wanted = [reference(each.float()).square().mean() for each in data[0]]
        torch.testing.assert_close(torch.stack(losses).float(), torch.stack(wanted), atol=3e-3, rtol=1e-2)
        losses[dist.get_rank()].backward()
        (sum(wanted) / 2).backward()  # type: ignore[operator]
        for each in (optimizer, other):
            each.step()
            each.zero_grad()


@on_ranks(2)
def test_a_saved_view_of_a_weight_outlives_the_forward() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(SavesAView(6, 6) for _ in range(4)))
    reference, data = copy.deepcopy(net), batches(1, 0)
    context = shard(net, "zero-3", *net)
    net(data[0, dist.get_rank()]).square().mean().backward()
    whole_batch(reference, data)
    for param, wanted in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)  # type: ignore[union-attr]
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    context.reset()  # else the units used last stay unsharded for the next pass
    assert [module.storage.nbytes() for module in net] == [0] * 4


@on_ranks(2)
def test_orders_of_nested_units_and_sibling_roots_follow_each_other() -> None:
    net = nn.Sequential(layers(2), nn.Linear(6, 6))
    with fully_shard_context("cpu") as context:
        for module in (net[0][0], net[0], net[1]):  # type: ignore[index]
            fully_shard(module, mesh_of(1), placements("zero-3"))
    first, last = net[0], net[1]
    assert list(context.forward_order) == [first, first[0], last]  # type: ignore[index]
    assert list(context.backward_order) == [last, first, first[0]]  # type: ignore[index]


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "zero-3"])
@on_ranks(2)
def test_what_is_held_at_rest_is_the_part_of_this_rank(strategy: str) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    whole = 4 * 64 * 64
    half = whole if strategy == "ddp" else whole // 2
    context = shard(net, strategy, *net)
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
