"""Modules sharded one by one, in place, against one process on the whole batch."""

import gc
import weakref
from collections.abc import Iterable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, fully_shard_model
from megatron_fsdp.engine.engine import engine_of_module
from megatron_fsdp.errors import ScheduleError
from megatron_fsdp.experimental import Placements, fully_shard, fully_shard_context, fully_shard_optimizer, microbatch
from megatron_fsdp.experimental.module import FsdpContext, FsdpModule
from tests.support.arrangements import mesh_of
from tests.support.case import momentum
from tests.support.doors import Before, assert_like_one_process, assert_same, backward, build, wholes
from tests.support.on_ranks import on_ranks, refusal
from tests.support.zoo import FEATURES, Layer, Ordered, Recomputed, vector_case

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


CASE = vector_case(Ordered)


def net(recomputes: bool = False, seed: int = 0) -> Any:
    """Layers between two ends that have one weight."""
    model = build(partial(Recomputed, "inside", False) if recomputes else Ordered, seed)
    model.last.weight = model.first.weight
    return model


def mesh_for(strategy: str = "zero-3", shape: tuple[int, ...] = ()) -> DeviceMesh:
    """A mesh of the dimensions that a strategy needs, of this shape, or with two replicas."""
    num_ranks = dist.get_world_size()
    shape = shape or ((num_ranks,) if len(STRATEGIES[strategy][0]) == 1 else (2, num_ranks // 2))
    return mesh_of(shape, ("outer", "inner")[-len(shape) :])


def placements(strategy: str) -> Placements:
    return Placements(range(len(STRATEGIES[strategy][0])), *STRATEGIES[strategy])


def shard(units: Iterable[nn.Module], *strategies: str, shape: tuple[int, ...] = ()) -> FsdpContext:
    """Shard modules, inner ones first, by one strategy after another."""
    with fully_shard_context("cpu") as context:
        for module, name in zip(units, cycle(strategies), strict=False):
            fully_shard(module, mesh_for(name, shape), placements(name))
    return context


def all_units(net: Any) -> list[nn.Module]:
    """One of the two linears of a layer is a unit inside of the layer's own."""
    return [part for layer in net.layers for part in (layer.up, layer)] + [net]


def layers_and_root(net: Any) -> list[nn.Module]:
    return [*net.layers, net]


def by_microbatch(context: FsdpContext) -> Before:
    """Tell the context which microbatch is the last one."""
    return lambda _, is_last: microbatch(context, is_last)


def connected(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = momentum(net)
    fully_shard_optimizer(optimizer)
    return optimizer


def assert_trains(net: nn.Module, reference: nn.Module, context: FsdpContext) -> None:
    """Assert that three steps of two microbatches are those of one process; torch's norm takes no two meshes."""
    options = {"steps": 3, "case": CASE, "clip": None}
    assert_like_one_process(net, reference, by_microbatch(context), connected(net), **options)


RANKS = (2, 3, 1, 3, 4, 4, 4)


@pytest.mark.full(short=["ddp-2", "zero-3-3"])
@pytest.mark.parametrize(("strategy", "num_ranks"), list(zip(STRATEGIES, RANKS, strict=True)))
@on_ranks()
def test_nested_units_are_one_process(strategy: str) -> None:
    model = net()
    assert_trains(model, net(), shard(all_units(model), strategy))


@pytest.mark.full(short=["ddp", "zero-3", "hfsdp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_a_step_sends_what_its_placements_need(strategy: str) -> None:
    model = net()
    context, optimizer = shard(layers_and_root(model), strategy), connected(model)
    units, microbatches = 5, 3
    for _ in range(3):
        before = {name: traffic.copy() for name, traffic in context.engine.traffic_by_axis.items()}
        for number in range(microbatches):
            with microbatch(context, is_last=number == microbatches - 1):
                backward(model, case=CASE)
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(2, FEATURES))  # gathers the new weights, which no later step has to
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
    model = net(recomputes=True)
    assert_trains(model, net(recomputes=True), shard(all_units(model), *STRATEGIES))


def linears(count: int = 3) -> nn.Sequential:
    return build(lambda: nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(count))))


@on_ranks(2)
def test_roots_without_a_module_above_them_share_an_engine() -> None:
    net, reference = linears(), linears()
    context = shard(net, "zero-3")
    assert [module is root for module, root in zip(net, context.roots, strict=True)] == [True] * 3
    assert list(context.forward_order) == list(net)
    assert list(context.backward_order) == list(net)[::-1]
    assert_trains(net, reference, context)


@on_ranks(2)
def test_a_root_may_own_nothing_and_orders_are_depth_first() -> None:
    net, reference = (nn.Sequential(linears(2), linears(1)[0]) for _ in range(2))
    first, second, last = net[0][0], net[0][1], net[1]  # type: ignore[index]
    context = shard([first, second, net[0], last, net], "zero-3")
    assert [module.parameter_groups for module in (net, net[0])] == [(), ()]  # type: ignore[misc]
    assert list(context.forward_order) == [net, net[0], first, second, last]
    assert list(context.backward_order) == [net, last, net[0], second, first]
    assert_trains(net, reference, context)


@on_ranks(2)
def test_frozen_units_and_unused_parameters() -> None:
    model, reference = net(), net()
    for each in (model, reference):
        each.layers[0].requires_grad_(False)
        each.spare = build(partial(nn.Linear, 3, 3))
    context = shard(layers_and_root(model), "zero-3")
    assert model.layers[0].parameter_groups[0].main_grad is None
    assert_trains(model, reference, context)


@on_ranks(4)
def test_experts_have_a_mesh_of_their_own() -> None:
    """A dense linear, and the expert of this rank, which gets the tokens of its ranks."""
    mesh, batch = mesh_of((2, 2), ("edp", "ep")), CASE.make_batch(4, torch.Generator().manual_seed(0))
    chosen = mesh.get_local_rank("ep")
    dense, *experts = linears()
    model = nn.Sequential(dense, nn.ReLU(), experts[chosen])
    dense, *experts = linears()
    references = [nn.Sequential(dense, nn.ReLU(), expert) for expert in experts]
    with fully_shard_context("cpu"):
        fully_shard(model[2], mesh["edp"], Placements(["edp"], [S], [S], [S]), grad_divisor=2)
        fully_shard(model, mesh_for(), placements("zero-3"))
    CASE.loss(model, batch.part(dist.get_rank(), 4)).backward()
    for number in range(4):
        (CASE.loss(references[number % 2], batch.part(number, 4)) / 4).backward()
    assert_same(*(wholes(param.grad for param in each.parameters()) for each in (model, references[chosen])))


@on_ranks(2)
def test_messages_name_the_reset_of_the_context() -> None:
    model = net()
    context = shard(layers_and_root(model), "zero-3")
    handle = model.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model, case=CASE)
    handle.remove()
    with pytest.raises(ScheduleError, match=r"call reset\(\) of the fully_shard_context after an exception"):
        backward(model, case=CASE)
    context.reset()
    backward(model, case=CASE)


@on_ranks(4)
def test_equal_placements_on_two_meshes_keep_their_ranks() -> None:
    every, few = mesh_of((4,), ("every",)), mesh_of((2, 2), ("few", "others"))["few"]
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with fully_shard_context("cpu"):
        for module, mesh in zip(net, (few, every), strict=True):
            fully_shard(module, mesh, Placements([0], [S], [S], [S]))
    groups = [group for module in net for group in module.parameter_groups]  # type: ignore[union-attr]
    assert [(group.mesh, group.main_weight.numel()) for group in groups] == [(few, 32), (every, 16)]


@on_ranks(2)
def test_two_forwards_an_exception_and_an_evaluation() -> None:
    model, reference = net(), net()
    context = shard(layers_and_root(model), "zero-3")
    with microbatch(context, is_last=False):
        assert not context.is_last_microbatch
    assert context.is_last_microbatch
    handle = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model, case=CASE)
    handle.remove()
    context.reset()
    with torch.inference_mode():
        model(torch.ones(2, FEATURES))
    batches = [CASE.make_batch(4, torch.Generator().manual_seed(index)) for index in range(2)]
    sum(CASE.loss(model, batch.part(dist.get_rank(), 2)) for batch in batches).backward()  # type: ignore[union-attr]
    sum(CASE.loss(reference, batch) for batch in batches).backward()  # type: ignore[union-attr]
    assert_same(*(wholes(param.grad for param in each.parameters()) for each in (model, reference)))


@on_ranks(2)
def test_groups_show_their_buffers_and_unshard() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
    with fully_shard_context("cpu"):
        fully_shard(module, mesh_for(), placements("zero-3"))
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
    model = net()
    context = shard(layers_and_root(model), "zero-3")
    layer = model.layers[1]
    assert isinstance(layer, FsdpModule)
    assert (layer.name, layer.is_root(), model.is_root()) == ("layers.1", False, True)  # type: ignore[operator]
    assert [type(module).__name__ for module in context.forward_order] == ["ExperimentalFsdpOrdered"] + [
        "ExperimentalFsdpLayer"
    ] * 4
    seen = []
    layer.down.register_forward_hook(lambda *_: seen.append(layer.phase))
    loss = model(torch.ones(2, FEATURES)).sum()
    assert seen == [FsdpModule.Phase.FORWARD]
    assert all(isinstance(param, DTensor) for param in model.parameters())
    loss.backward()
    assert layer.phase is FsdpModule.Phase.RESTING
    tied = {param.fqns for group in model.parameter_groups for param in group.fsdp_parameters}
    assert ("first.weight", "last.weight") in tied


@on_ranks(2)
def test_a_deleted_model_frees_its_engine_at_once() -> None:
    model = net()
    context = shard(all_units(model), "zero-3")
    backward(model, case=CASE)
    engine = weakref.ref(context.engine)
    gc.collect()
    gc.disable()
    try:
        del model
        assert engine() is None
    finally:
        gc.enable()


@on_ranks(2)
def test_bad_input_is_refused_and_changes_nothing() -> None:
    mesh, zero3 = mesh_for(), placements("zero-3")
    alone = nn.Linear(2, 2)
    assert "inside fully_shard_context" in refusal(fully_shard, alone, mesh, zero3, error=RuntimeError)
    model = net()
    with fully_shard_context("cpu") as context:
        assert "does not support nesting" in refusal(fully_shard_context("cpu").__enter__, error=RuntimeError)
        assert "grad_divisor=0" in refusal(fully_shard, alone, mesh, zero3, grad_divisor=0, error=ValueError)
        fully_shard(model.first, mesh, zero3)
        assert "is tied to" in refusal(fully_shard, model.last, mesh, zero3, error=ValueError)
        assert type(model.last) is nn.Linear
        assert "sharded already" in refusal(fully_shard, model.first, mesh, zero3, error=ValueError)
        assert "Exit fully_shard_context" in refusal(microbatch(context, True).__enter__, error=RuntimeError)
        assert "Exit fully_shard_context" in refusal(model.first, torch.ones(1, 6), error=RuntimeError)
    assert "another fully_shard_context" in refusal(_in_context, model, mesh, zero3, error=ValueError)
    assert type(model) is Ordered
    assert "load_state_dict(assign=True)" in refusal(model.first.load_state_dict, {}, assign=True, error=RuntimeError)
    assert engine_of_module(model.first) is context.engine
    model.first(torch.ones(1, 6))
    assert "sharded already" in refusal(fully_shard_model, model, error=ValueError)


SHARDED_HERE = "sharded by megatron_fsdp already; leave torch's fully_shard out, or call it instead"


def _facts(model: nn.Module) -> list[Any]:
    """Return what sharding changes of a model: classes, hooks and parameters."""
    held = [(type(part), len(part._forward_pre_hooks), len(part._forward_hooks)) for part in model.modules()]
    return [*held, *map(id, model.parameters())]


@pytest.mark.parametrize("kind", ["in place", "wrapper", "inside of it", "buckets"])
@on_ranks(2)
def test_torch_does_not_shard_what_is_sharded_here(kind: str) -> None:
    model, mesh = net(), mesh_for()
    inside = model
    if kind == "in place":
        shard(layers_and_root(model), "zero-3")
    elif kind == "buckets":
        model = DistributedDataParallel(DistributedDataParallelConfig(), inside)
    else:
        wrapper = fully_shard_model(inside, mesh, fsdp_unit_modules=[Layer])
        model = wrapper if kind == "wrapper" else inside
    for part in (model, inside.layers[0], inside.layers[0].down):
        before = _facts(model)
        said = refusal(torch.distributed.fsdp.fully_shard, part, error=ValueError, mesh=mesh)
        assert said == f"this module is {SHARDED_HERE}"
        assert _facts(model) == before
    model(torch.ones(2, FEATURES)).sum().backward()


@pytest.mark.parametrize("whole", [True, False])
@on_ranks(2)
def test_nothing_here_shards_what_torch_has_sharded(whole: bool) -> None:
    model, mesh = net(), mesh_for()
    torch.distributed.fsdp.fully_shard(model if whole else model.layers[1], mesh=mesh)
    before = _facts(model)
    where = "the model" if whole else "the model at layers.1"
    for call in (
        lambda: _in_context(model, mesh, placements("zero-3")),
        lambda: fully_shard_model(model, mesh),
        lambda: DistributedDataParallel(DistributedDataParallelConfig(), model),
    ):
        assert f"{where} is sharded by FSDP2 (torch's fully_shard) already" in refusal(call, error=ValueError)
        assert _facts(model) == before


def _in_context(module: nn.Module, mesh: DeviceMesh, given: Placements) -> None:
    with fully_shard_context("cpu"):
        fully_shard(module, mesh, given)


@on_ranks(2)
def test_ranks_that_shard_in_different_ways_hear_of_it() -> None:
    given = placements("zero-3" if dist.get_rank() else "zero-2")
    assert "parameter weight" in refusal(_in_context, nn.Linear(4, 4), mesh_for(), given, error=ValueError)
