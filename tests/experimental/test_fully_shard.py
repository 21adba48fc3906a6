"""Modules sharded one by one, in place, against one process on the whole batch."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, fully_shard_model
from megatron_fsdp.engine.engine import engine_of_module
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.experimental import Placements, fully_shard, fully_shard_context, fully_shard_optimizer, microbatch
from megatron_fsdp.experimental.module import FsdpContext, FsdpModule
from tests.support.on_ranks import on_ranks

R, S, AVG = Replicate(), Shard(0), Partial("avg")
STRATEGIES: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    "ddp": ([R], [AVG], [R]),
    "zero-1": ([R], [AVG], [S]),
    "zero-2": ([R], [S], [S]),
    "zero-3": ([S], [S], [S]),
    "hsdp": ([R, S], [AVG, S], [R, S]),
    "hfsdp": ([R, S], [AVG, S], [S, S]),
    "replicated weights, hybrid": ([R, R], [AVG, S], [S, S]),
}


class Block(nn.Module):
    """Two linears, one of which is a unit inside of the block's own."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.inner, self.outer, self.recomputes = nn.Linear(6, 10), nn.Linear(10, 6), recomputes

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input."""
        if self.recomputes:
            return x + self.outer(checkpoint(self.inner, x, use_reentrant=False).tanh())  # type: ignore[union-attr]
        return x + self.outer(self.inner(x).tanh())


class Net(nn.Module):
    """Blocks between an embedding-like linear and a head, tied."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(3))
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Run all."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mesh_of(dims: int) -> DeviceMesh:
    sizes = (dist.get_world_size(),) if dims == 1 else (2, dist.get_world_size() // 2)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-dims:])


def placements(strategy: str) -> Placements:
    parameter, gradient, optimizer = STRATEGIES[strategy]
    return Placements(range(len(parameter)), parameter, gradient, optimizer)


def shard(net: nn.Module, strategies: Sequence[str], units: Callable[[Any], list[nn.Module]]) -> FsdpContext:
    """Shard the units of a model, one strategy after another."""
    meshes = {len(STRATEGIES[name][0]): mesh_of(len(STRATEGIES[name][0])) for name in strategies}
    with fully_shard_context("cpu") as context:
        for number, module in enumerate(units(net)):
            name = strategies[number % len(strategies)]
            fully_shard(module, meshes[len(STRATEGIES[name][0])], placements(name))
    return context


def all_units(net: Net) -> list[nn.Module]:
    return [part for block in net.blocks for part in (block.inner, block)] + [net]  # type: ignore[list-item]


def blocks_and_root(net: Net) -> list[nn.Module]:
    return [*net.blocks, net]


def pair(recomputes: bool = False) -> tuple[Net, Net]:
    torch.manual_seed(0)
    net = Net(recomputes)
    return net, copy.deepcopy(net)


def batches(microbatches: int, step: int) -> Tensor:
    """Inputs of all microbatches and ranks."""
    made = torch.Generator().manual_seed(step)
    return torch.randn(microbatches, dist.get_world_size(), 5, 6, generator=made)


def assert_like_one_process(
    net: nn.Module, reference: nn.Module, context: FsdpContext, microbatches: int, *, tells: bool = True
) -> None:
    """Three steps of both: every gradient and every weight."""
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (net, reference))
    fully_shard_optimizer(optimizer)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        data = batches(microbatches, step)
        for number in range(microbatches):
            with microbatch(context, is_last=not tells or number == microbatches - 1):
                (net(data[number, rank]).square().mean() / microbatches).backward()
            for each in data[number]:
                (reference(each).square().mean() / microbatches / num_ranks).backward()
        for (name, param), (_, wanted) in zip(net.named_parameters(), reference.named_parameters(), strict=True):
            assert isinstance(param, DTensor)
            if wanted.grad is None:
                assert param.grad is None
                continue
            assert isinstance(param.grad, DTensor)
            torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, msg=f"gradient of {name}")
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        for (name, param), (_, wanted) in zip(net.named_parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), wanted, msg=name)  # type: ignore[attr-defined]


RANKS = (2, 3, 1, 3, 4, 4, 4)


@pytest.mark.full(short=["ddp-2", "zero-3-3"])
@pytest.mark.parametrize(("strategy", "num_ranks"), list(zip(STRATEGIES, RANKS, strict=True)))
@on_ranks()
def test_nested_units_are_one_process(strategy: str) -> None:
    net, reference = pair()
    assert_like_one_process(net, reference, shard(net, [strategy], all_units), 2)


@pytest.mark.full(short=["ddp", "zero-3", "hfsdp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_a_step_sends_what_its_placements_need(strategy: str) -> None:
    net, _ = pair()
    context = shard(net, [strategy], blocks_and_root)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    fully_shard_optimizer(optimizer)
    units, microbatches = 4, 3
    for step in range(3):
        before = {name: traffic.copy() for name, traffic in context.engine.traffic_by_axis.items()}
        for number in range(microbatches):
            with microbatch(context, is_last=number == microbatches - 1):
                net(batches(microbatches, step)[number, dist.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net(batches(1, step)[0, 0])  # gathers the new weights, which no later step has to
        sent = {name: traffic.since(before[name]) for name, traffic in context.engine.traffic_by_axis.items()}
    counted = {name: (each.gathers, each.reductions) for name, each in sent.items()}
    each_pass, once = units * microbatches, units
    outer = {"outer": (once if "f" in strategy or "hybrid" in strategy else 0, once)}
    assert (
        counted
        == {
            "ddp": {"inner": (0, once)},
            "zero-1": {"inner": (once, once)},
            "zero-2": {"inner": (once, each_pass)},
            "hsdp": outer | {"inner": (counted["inner"][0], each_pass)},
            "hfsdp": outer | {"inner": (counted["inner"][0], each_pass)},
            "zero-3": {"inner": (counted["inner"][0], each_pass)},
            "replicated weights, hybrid": outer | {"inner": (once, each_pass)},
        }[strategy]
    )
    if STRATEGIES[strategy][0][-1] is S:  # the last two units of a forward stay for its backward
        assert each_pass < counted["inner"][0] <= 2 * each_pass + once


@on_ranks(4)
def test_units_have_placements_and_meshes_of_their_own() -> None:
    net, reference = pair(recomputes=True)
    assert_like_one_process(net, reference, shard(net, list(STRATEGIES), all_units), 2)


@on_ranks(2)
def test_roots_without_a_module_above_them_share_an_engine() -> None:
    net, reference = (nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))) for _ in range(2))
    reference.load_state_dict(net.state_dict())
    for param in net.parameters():
        dist.broadcast(param.data, 0)
    for each in reference.parameters():
        dist.broadcast(each.data, 0)
    context = shard(net, ["zero-3"], lambda model: list(model))
    assert [module is root for module, root in zip(net, context.roots, strict=True)] == [True] * 3
    assert list(context.forward_order) == list(net)
    assert list(context.backward_order) == list(net)[::-1]
    assert_like_one_process(net, reference, context, 2)


@on_ranks(2)
def test_a_root_may_own_nothing_and_orders_are_depth_first() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, 6))
    reference = copy.deepcopy(net)
    first, second, last = net[0][0], net[0][1], net[1]
    context = shard(net, ["zero-3"], lambda net: [first, second, net[0], last, net])
    assert [module.parameter_groups for module in (net, net[0])] == [(), ()]  # type: ignore[misc]
    assert list(context.forward_order) == [net, net[0], first, second, last]
    assert list(context.backward_order) == [net, last, net[0], second, first]
    assert_like_one_process(net, reference, context, 2)


@on_ranks(2)
def test_frozen_units_and_unused_parameters() -> None:
    net, reference = pair()
    for model in (net, reference):
        model.blocks[0].requires_grad_(False)
        model.spare = nn.Linear(3, 3)
        model.spare.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(3)})
    context = shard(net, ["zero-3"], blocks_and_root)
    assert net.blocks[0].parameter_groups[0].main_grad is None  # type: ignore[union-attr, operator, index]
    assert_like_one_process(net, reference, context, 2)


class OneExpert(nn.Module):
    """A dense linear, and the expert of this rank, which gets the tokens of its ranks."""

    def __init__(self, experts: int, chosen: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(4, 4)
        made = [nn.Linear(4, 4) for _ in range(experts)]
        self.experts = nn.ModuleList(made if chosen is None else [made[chosen]])

    def forward(self, x: Tensor, expert: int = 0) -> Tensor:
        """Run both."""
        return self.experts[expert](self.dense(x).relu())


@on_ranks(4)
def test_experts_have_a_mesh_of_their_own() -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    chosen = mesh.get_local_rank("ep")
    model, reference = OneExpert(2, chosen), OneExpert(2)
    on_axis = Placements(["edp"], [S], [S], [S])
    with fully_shard_context("cpu"):
        fully_shard(model.experts[0], mesh["edp"], on_axis, grad_divisor=2)
        fully_shard(model, init_device_mesh("cpu", (4,)), placements("zero-3"))
    data = batches(1, 0)[0][..., :4]
    model(data[rank]).square().mean().backward()
    for number in range(4):
        (reference(data[number], number % 2).square().mean() / 4).backward()
    for name, param in model.named_parameters():
        wanted = dict(reference.named_parameters())[name.replace("experts.0", f"experts.{chosen}")].grad
        torch.testing.assert_close(param.grad.full_tensor(), wanted)  # type: ignore[union-attr]


@on_ranks(2)
def test_messages_name_the_reset_of_the_context() -> None:
    net, _ = pair()
    context, data = shard(net, ["zero-3"], blocks_and_root), batches(2, 0)[0, dist.get_rank()]
    handle = net.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net(data).sum().backward()
    handle.remove()
    with pytest.raises(ScheduleError, match=r"call reset\(\) of the fully_shard_context after an exception"):
        net(data)
    context.reset()
    net(data).sum().backward()


@on_ranks(4)
def test_equal_placements_on_two_meshes_keep_their_ranks() -> None:
    every, few = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("few", "others"))["few"]
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with fully_shard_context("cpu"):
        for module, mesh in zip(net, (few, every), strict=True):
            fully_shard(module, mesh, Placements([0], [S], [S], [S]))
    groups = [group for module in net for group in module.parameter_groups]  # type: ignore[union-attr]
    assert [(group.mesh, group.main_weight.numel()) for group in groups] == [(few, 32), (every, 16)]


@on_ranks(2)
def test_two_forwards_an_exception_and_an_evaluation() -> None:
    net, reference = pair()
    context = shard(net, ["zero-3"], blocks_and_root)
    with microbatch(context, is_last=False):
        assert not context.is_last_microbatch
    assert context.is_last_microbatch
    data = batches(2, 0)
    failing = [True]

    def fail_once(*_: object) -> None:
        if failing:
            failing.pop()
            raise ZeroDivisionError

    net.blocks[1].register_forward_pre_hook(fail_once)
    with pytest.raises(ZeroDivisionError):
        net(data[0, dist.get_rank()])
    context.reset()
    with torch.inference_mode():
        net(data[0, dist.get_rank()])
    losses = [net(data[number, dist.get_rank()]).square().mean() for number in range(2)]
    sum(losses).backward()  # type: ignore[union-attr]
    for each in data.flatten(0, 1):
        (reference(each).square().mean() / 2).backward()
    for param, wanted in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad)  # type: ignore[union-attr]


@on_ranks(2)
def test_groups_show_their_buffers_and_unshard() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
    with fully_shard_context("cpu"):
        fully_shard(module, mesh_of(1), placements("zero-3"))
    (group,) = module.parameter_groups  # type: ignore[operator, misc]
    nn.init.constant_(module.weight, 2.0)
    group.sync_model_weight_from_main_weight()
    assert group.main_weight.eq(2).sum() == group.model_weight.eq(2).sum() == module.weight.to_local().numel()  # type: ignore[operator]
    assert (group.main_weight.dtype, group.model_weight.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(module(torch.ones(1, 4, dtype=torch.bfloat16)), torch.full((1, 6), 8.0, dtype=torch.bfloat16))
    group.unshard_parameters()
    assert torch.equal(module.weight, torch.full((6, 4), 2.0, dtype=torch.bfloat16))
    group.reshard_parameters()
    group.release_unsharded_storage()
    assert isinstance(module.weight, DTensor)
    with torch.no_grad():  # the unit may stay gathered
        module(torch.ones(1, 4, dtype=torch.bfloat16))
        module.weight.fill_(3.0)
    group.sync_model_weight_from_main_weight()
    assert torch.equal(module(torch.ones(1, 4, dtype=torch.bfloat16)), torch.full((1, 6), 12.0, dtype=torch.bfloat16))
    assert module.parameter_groups[0].main_grad is None  # type: ignore[operator, index]


@on_ranks(2)
def test_phases_and_names() -> None:
    net, _ = pair()
    context = shard(net, ["zero-3"], blocks_and_root)
    block = net.blocks[1]
    assert isinstance(block, FsdpModule)
    assert (block.name, block.is_root(), net.is_root()) == ("blocks.1", False, True)  # type: ignore[operator]
    assert [type(module).__name__ for module in context.forward_order] == ["ExperimentalFsdpNet"] + [
        "ExperimentalFsdpBlock"
    ] * 3
    seen = []
    block.outer.register_forward_hook(lambda *_: seen.append(block.phase))
    loss = net(torch.ones(2, 6)).sum()
    assert seen == [FsdpModule.Phase.FORWARD]
    assert all(isinstance(param, DTensor) for param in net.parameters())
    loss.backward()
    assert block.phase is FsdpModule.Phase.RESTING
    tied = {param.fqns for group in net.parameter_groups for param in group.fsdp_parameters}  # type: ignore[union-attr, operator]
    assert ("first.weight", "head.weight") in tied


@on_ranks(2)
def test_a_deleted_model_frees_its_engine_at_once() -> None:
    net, _ = pair()
    context = shard(net, ["zero-3"], all_units)
    net(torch.ones(2, 6)).sum().backward()
    engine = weakref.ref(context.engine)
    gc.collect()
    gc.disable()
    try:
        del net
        assert engine() is None
    finally:
        gc.enable()


def refusal(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@on_ranks(2)
def test_bad_input_is_refused_and_changes_nothing() -> None:
    mesh, zero3 = mesh_of(1), placements("zero-3")
    alone = nn.Linear(2, 2)
    assert "inside fully_shard_context" in refusal(RuntimeError, lambda: fully_shard(alone, mesh, zero3))
    net = Net()
    with fully_shard_context("cpu") as context:
        assert "does not support nesting" in refusal(RuntimeError, lambda: fully_shard_context("cpu").__enter__())
        assert "grad_divisor=0" in refusal(ValueError, lambda: fully_shard(alone, mesh, zero3, grad_divisor=0))
        fully_shard(net.first, mesh, zero3)
        assert "is tied to" in refusal(ValueError, lambda: fully_shard(net.head, mesh, zero3))
        assert type(net.head) is nn.Linear
        assert "sharded already" in refusal(ValueError, lambda: fully_shard(net.first, mesh, zero3))
        assert "Exit fully_shard_context" in refusal(RuntimeError, lambda: microbatch(context, True).__enter__())
        assert "Exit fully_shard_context" in refusal(RuntimeError, lambda: net.first(torch.ones(1, 6)))
    assert "another fully_shard_context" in refusal(ValueError, lambda: _in_context(net, mesh, zero3))
    assert type(net) is Net
    assert "load_state_dict(assign=True)" in refusal(RuntimeError, lambda: net.first.load_state_dict({}, assign=True))
    assert engine_of_module(net.first) is context.engine
    net.first(torch.ones(1, 6))
    assert "sharded already" in refusal(ValueError, lambda: fully_shard_model(net))


SHARDED_HERE = "sharded by megatron_fsdp already; leave torch's fully_shard out, or call it instead"


def _facts(model: nn.Module) -> list[Any]:
    """Return what sharding changes of a model: classes, hooks and parameters."""
    held = [(type(part), len(part._forward_pre_hooks), len(part._forward_hooks)) for part in model.modules()]
    return [*held, *map(id, model.parameters())]


@pytest.mark.parametrize("kind", ["in place", "wrapper", "inside of it", "buckets"])
@on_ranks(2)
def test_torch_does_not_shard_what_is_sharded_here(kind: str) -> None:
    net, mesh = Net(), mesh_of(1)
    model: nn.Module = net
    if kind == "in place":
        shard(net, ["zero-3"], blocks_and_root)
    elif kind == "buckets":
        model = DistributedDataParallel(DistributedDataParallelConfig(), net)
    else:
        wrapper = fully_shard_model(net, mesh, fsdp_unit_modules=[Block])
        model = wrapper if kind == "wrapper" else net
    for part in (model, net.blocks[0], net.blocks[0].outer):
        before = _facts(model)
        said = refusal(ValueError, partial(torch.distributed.fsdp.fully_shard, part, mesh=mesh))
        assert said == f"this module is {SHARDED_HERE}"
        assert _facts(model) == before
    model(batches(1, 0)[0, 0]).sum().backward()


@pytest.mark.parametrize("whole", [True, False])
@on_ranks(2)
def test_nothing_here_shards_what_torch_has_sharded(whole: bool) -> None:
    net, mesh = Net(), mesh_of(1)
    torch.distributed.fsdp.fully_shard(net if whole else net.blocks[1], mesh=mesh)
    before = _facts(net)
    where = "the model" if whole else "the model at blocks.1"
    for call in (
        lambda: _in_context(net, mesh, placements("zero-3")),
        lambda: fully_shard_model(net, mesh),
        lambda: DistributedDataParallel(DistributedDataParallelConfig(), net),
    ):
        assert f"{where} is sharded by FSDP2 (torch's fully_shard) already" in refusal(ValueError, call)
        assert _facts(net) == before


def _in_context(module: nn.Module, mesh: DeviceMesh, given: Placements) -> None:
    with fully_shard_context("cpu"):
        fully_shard(module, mesh, given)


@on_ranks(2)
def test_ranks_that_shard_in_different_ways_hear_of_it() -> None:
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def call() -> None:
        with fully_shard_context("cpu"):
            fully_shard(net[0], mesh_of(1), placements("zero-3" if rank else "zero-2"))

    assert "parameter weight" in refusal(ValueError, call)
