"""Small neighbouring units that `fully_shard` of this package merges: beside one process, and beside unmerged ones."""

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megatron_fsdp.describe import describe
from megatron_fsdp.engine.engine import engine_of_model
from megatron_fsdp.errors import ConfigurationError, ShardOperationError
from megatron_fsdp.fsdp2 import fully_shard, register_fsdp_forward_method
from tests.fsdp2.test_fully_shard import all_reduce, always, pickle_of, sync, unit_names
from tests.support import doors
from tests.support.case import momentum as sgd
from tests.support.doors import Before, assert_same, hybrid, whole, wholes
from tests.support.on_ranks import on_ranks, refusal
from tests.support.zoo import FEATURES, Branches, Layer, NeighbourCallers, Ordered, Recomputed, vector_case

LAYER_BYTES = sum(param.nbytes for param in Layer().parameters())
SIX = partial(Ordered, tuple(range(6)), 6)
build = partial(doors.build, SIX)
backward = partial(doors.backward, case=vector_case(SIX))
# Gradients are not clipped, as norms are added up otherwise where units are merged.
train = partial(doors.train, steps=3, case=vector_case(SIX), clip=None)


class Tied(Layer):
    """A unit whose two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.down.weight = self.up.weight


def partly_frozen() -> Ordered:
    model = SIX()
    for name in ("layers.0", "layers.1.up", "layers.4.down.bias"):
        frozen = model.get_parameter(name) if name.endswith("bias") else model.get_submodule(name)
        frozen.requires_grad_(False)
    return model


def shard(model: Any, together: int = 3, **options: Any) -> Any:
    """Shard each layer and the root; units of up to so many layers are merged."""
    largest = max(sum(param.nbytes for param in layer.parameters()) for layer in model.layers)
    os.environ["MFSDP_MESSAGE_BYTES"] = str(together * largest)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def layer_by_layer(model: Any, is_last: bool) -> None:
    for layer in model.layers:
        layer.set_requires_gradient_sync(is_last, recurse=False)


def prefetch(model: Any, _is_last: bool) -> None:
    """What torchtitan sets, and hints of torch's."""
    layers = list(model.layers)
    model.unshard()
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    layers[0].unshard(async_op=True)
    layers[-1].set_unshard_in_backward(False)
    model.set_is_last_backward(True)


def show_and_hide(model: Any, _is_last: bool) -> None:
    for layer in model.layers:
        layer.unshard()
    for layer in model.layers[1:4]:
        layer.reshard()


def keep_some(model: Any, is_last: bool) -> None:
    model.layers[1].set_reshard_after_forward(is_last)
    model.layers[2].set_reshard_after_backward(is_last)


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], Before]] = {
    "plain": (SIX, {}, always),
    "accumulated": (SIX, {}, sync),
    "accumulated layer by layer": (SIX, {}, layer_by_layer),
    "in another order": (partial(Ordered, (3, 0, 4, 1, 0), 5), {}, sync),  # layer 2 is never called, layer 0 twice
    "recomputed": (partial(Recomputed, "units", False), {}, sync),
    "recomputed, reentrant": (partial(Recomputed, "pairs", True), {}, always),
    "recomputed inside one another": (NeighbourCallers, {}, always),
    "partly frozen": (partly_frozen, {}, sync),
    "tied": (partial(Ordered, (0, 1, 2, 3), 4, Tied), {}, sync),
    "branching": (Branches, {}, always),
    "prefetched": (SIX, {}, prefetch),
    "shown and hidden": (SIX, {}, show_and_hide),
    "some kept": (SIX, {}, keep_some),
    "all kept": (SIX, {"reshard_after_forward": False}, sync),
    "in host memory": (SIX, {"offload_policy": CPUOffloadPolicy()}, sync),
}


@pytest.mark.full(short=["accumulated-3", "partly frozen-3", "tied-2", "shown and hidden-2"])
@pytest.mark.parametrize(("case", "num_ranks"), [*product(CASES, (2, 3)), ("accumulated", 1)])
@on_ranks()
def test_merged_units_are_one_process_and_have_the_bits_of_unmerged_ones(case: str) -> None:
    make, options, each = CASES[case]
    merged = shard(doors.build(make), **options)
    found = train(merged, before=each)
    assert any(".." in name for name in unit_names(merged))
    assert_same(found, train(doors.build(make), alone=True))
    assert_same(found, train(shard(doors.build(make), 0, **options), before=each), rtol=0, atol=0)


@pytest.mark.full(short=["all_reduce"])
@pytest.mark.parametrize("each", [sync, all_reduce])
@on_ranks(4)
def test_merged_units_of_hybrid_meshes_are_one_process(each: Before) -> None:
    found = train(shard(build(), mesh=hybrid()), before=each)
    assert_same(found, train(build(), alone=True))
    assert_same(found, train(shard(build(), 0, mesh=hybrid()), before=each), rtol=0, atol=0)


@on_ranks(2)
def test_mixed_precision_has_the_bits_of_unmerged_units() -> None:
    found = train(shard(build(), mp_policy=BFLOAT16), before=sync)
    assert_same(found, train(shard(build(), 0, mp_policy=BFLOAT16), before=sync), rtol=0, atol=0)
    assert_same(found, train(build(), alone=True), rtol=5e-2, atol=5e-3)


# ---- which units are merged, and what is sent -----------------------------------------------------------------------


def names_after_a_forward(model: Any) -> list[str]:
    model(torch.ones(2, FEATURES))
    return unit_names(model)


SINGLE = [f"layers.{index}" for index in range(6)]


@pytest.mark.parametrize(
    ("together", "names", "gathers", "reductions"),
    [(0, SINGLE, 11, 7), (2, ["layers.0..1", "layers.2..3", "layers.4..5"], 5, 4), (9, ["layers.0..5"], 2, 2)],
)
@on_ranks(2)
def test_merged_units_take_one_message_each(together: int, names: list[str], gathers: int, reductions: int) -> None:
    model = shard(build(), together)
    train(model)
    assert unit_names(model) == ["", *names]
    assert ("small neighbours merged" in str(describe(model))) == (together > 0)
    engine = engine_of_model(model)
    before = replace(engine.traffic)
    backward(model)
    sent = engine.traffic.since(before)
    assert (sent.gathers, sent.reductions) == (gathers, reductions)


def of_layers(set_one: Callable[[Any], object]) -> Callable[[Any], object]:
    """Set one thing of layer 1."""
    return lambda model: set_one(model.layers[1])


APART: dict[str, Callable[[Any], object]] = {
    "sync": of_layers(lambda layer: layer.set_requires_gradient_sync(False)),
    "factor": of_layers(lambda layer: layer.set_gradient_divide_factor(3.0)),
    "hook": of_layers(lambda layer: layer.set_all_reduce_hook(lambda grad: grad.mul_(2))),
    "after forward": of_layers(lambda layer: layer.set_reshard_after_forward(False)),
    "after backward": of_layers(lambda layer: layer.set_reshard_after_backward(False)),
}


@pytest.mark.full(short=["sync", "hook", "after forward"])
@pytest.mark.parametrize("case", APART)
@on_ranks(2)
def test_what_is_set_apart_before_the_first_forward_is_not_merged(case: str) -> None:
    noted = []
    for together in (9, 0):
        model = shard(build(), together)
        APART[case](model)
        noted.append(train(model))
        assert unit_names(model) == ["", *(["layers.0", "layers.1", "layers.2..5"] if together else SINGLE)]
    assert_same(*noted, rtol=0, atol=0)


@on_ranks(2)
def test_a_divisor_from_before_the_first_forward_divides_the_sum() -> None:
    model, source = shard(build()), build()
    for module in (model, *model.layers):
        module.set_gradient_divide_factor(3.0)
    backward(model)
    backward(source)
    assert_same(wholes(param.grad for param in model.parameters()), [p.grad * 2 / 3 for p in source.parameters()])


@on_ranks(2)
def test_other_calls_are_not_merged() -> None:
    os.environ["MFSDP_MESSAGE_BYTES"] = str(9 * LAYER_BYTES)
    model = build()
    for index, layer in enumerate(model.layers):
        options = (
            {"mp_policy": replace(BFLOAT16, output_dtype=torch.float32)}
            if index == 2
            else {"reshard_after_forward": index == 3 or None}
        )
        if index == 4:
            fully_shard(layer.up)
        fully_shard(layer, **options)
    fully_shard(model)
    assert names_after_a_forward(model) == ["", "layers.0..1", *SINGLE[2:5], "layers.4.up", "layers.5"]
    skips = build()
    for layer in skips.layers:
        fully_shard(layer)
    assert names_after_a_forward(fully_shard(skips, ranks_may_skip_units=True)) == ["", *SINGLE]


@on_ranks(2)
def test_ranks_that_merge_otherwise_hear_of_it() -> None:
    model = shard(build(), dist.get_rank())
    words = refusal(model, torch.ones(2, FEATURES))
    assert f"MFSDP_MESSAGE_BYTES is 0 on rank 0, {LAYER_BYTES} on rank 1" in words


# ---- one module of a merged unit ------------------------------------------------------------------------------------


@on_ranks(2)
def test_one_module_is_shown_and_hidden() -> None:
    model, source = shard(build()), build()
    first, second, third = model.layers[:3]
    first.unshard()
    handle = second.unshard(async_op=True)
    assert isinstance(second.up.weight, DTensor)
    handle.wait()
    assert isinstance(third.up.weight, DTensor)
    first.reshard()
    assert isinstance(first.up.weight, DTensor)
    assert second.up.weight.equal(source.layers[1].up.weight)  # its memory is still there
    scheduler = engine_of_model(model).scheduler
    assert scheduler.is_gathered(1)
    second.reshard()
    assert not scheduler.is_gathered(1)
    second.unshard()
    torch.testing.assert_close(first(torch.ones(2, FEATURES)), source.layers[0](torch.ones(2, FEATURES)))
    with pytest.raises(ShardOperationError):
        second.up.weight @ torch.ones(FEATURES)  # a forward of a neighbour has hidden it
    assert_same(train(model), train(source, alone=True))


@on_ranks(2)
def test_one_module_is_called_alone() -> None:
    model, source = shard(build()), build()
    x = torch.arange(2.0 * FEATURES).view(2, FEATURES).requires_grad_()
    for _ in range(2):
        for each in (model, source):
            each.layers[1](x).square().sum().backward()
            each.layers[4](x).sum().backward()
    for (name, param), wanted in zip(model.named_parameters(), source.parameters(), strict=True):
        is_used = name.startswith(("layers.1.", "layers.4."))
        assert (param.grad is not None) == is_used
        if is_used:
            torch.testing.assert_close(whole(param.grad), wanted.grad)
    model.zero_grad()
    register_fsdp_forward_method(model.layers[2], "inside")
    assert model.layers[2].inside(x).equal(source.layers[2].inside(x))
    assert isinstance(model.layers[2].up.weight, DTensor)
    with torch.no_grad():
        assert model.layers[5](x).equal(source.layers[5](x))
    assert_same(train(model), train(build(), alone=True))


# ---- settings that change later -------------------------------------------------------------------------------------

LATER: dict[str, tuple[Callable[[Any, Any], object], Any, Any]] = {
    "set_requires_gradient_sync": (lambda layer, value: layer.set_requires_gradient_sync(value), True, False),
    "set_gradient_divide_factor": (lambda layer, value: layer.set_gradient_divide_factor(value), None, 4.0),
    "set_all_reduce_hook": (lambda layer, value: layer.set_all_reduce_hook(value), None, torch.Tensor.zero_),
}


@pytest.mark.full(short=["set_gradient_divide_factor", "set_all_reduce_hook"])
@pytest.mark.parametrize("method", LATER)
@on_ranks(2)
def test_what_one_module_sets_later_is_refused_until_all_have_set_it(method: str) -> None:
    change, before, after = LATER[method]
    trained = [(model := shard(build(), together), train(model)) for together in (3, 0)]
    (model, _), (single, _) = trained
    change(model.layers[1], after)
    assert refusal(model, torch.ones(2, FEATURES), error=ConfigurationError) == (
        f"{method} was called with {before} for layers.0 and with {after} for layers.1, which are small and reduced "
        "together, as unit layers.0..2; give all of them the same, call it before the first forward, or set "
        "MFSDP_MESSAGE_BYTES=0, so that each is reduced by itself"
    )
    for each in (model, single):
        for layer in each.layers[:3]:
            change(layer, after)
    assert_same(train(model), train(single), rtol=0, atol=0)


@on_ranks(2)
def test_switches_may_change_between_forward_and_backward() -> None:
    model, source = shard(build()), build()
    loss = model(torch.ones(2, FEATURES)).sum()
    model.layers[0].set_requires_gradient_sync(False)
    with pytest.raises(ConfigurationError, match=r"set_requires_gradient_sync was called with False for layers.0"):
        loss.backward()
    model.reset_iter_state()
    layer_by_layer(model, False)
    backward(model)
    assert all(param.grad is None for param in model.layers.parameters())
    assert model.first.weight.grad is not None
    layer_by_layer(model, True)
    backward(model)
    for _ in range(2):
        backward(source)
    assert_same(*(wholes(p.grad for p in each.parameters()) for each in (model, source)))


@on_ranks(2)
def test_a_hook_of_reduced_gradients_is_called_once_for_all() -> None:
    model, sizes = shard(build()), list[int]()

    def hook(reduced: Tensor) -> None:
        sizes.append(reduced.numel())
        reduced.mul_(3)

    for layer in model.layers:
        layer.set_all_reduce_hook(hook)
    source = build()
    backward(model)
    backward(source)
    assert_same(wholes(p.grad for p in model.layers.parameters()), [3 * p.grad for p in source.layers.parameters()])
    assert_same([whole(model.first.weight.grad)], [source.first.weight.grad])
    assert len(sizes) == 2  # of layers.0..2, and of layers.3..5


# ---- around it ------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_parameters_names_and_state_dicts_stay_those_of_the_calls() -> None:
    model, source = shard(build()), build()
    held, optimizer = list(model.parameters()), sgd(model)
    before = model.state_dict()
    train(model)
    train(source, alone=True)
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert list(model.state_dict()) == list(source.state_dict())
    assert_same(wholes(before.values()), wholes(source.state_dict().values()))  # they follow
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {*map(id, held)}
    other = shard(build(), 0)
    train(other)
    other.load_state_dict({name: whole(value) for name, value in pickle_of(source.state_dict()).items()})
    assert_same(train(other), train(source, alone=True))
    state = model.layers[1]._get_fsdp_state()
    assert state is not model.layers[0]._get_fsdp_state()
    assert state.modules == [model.layers[1]]
    assert state._fsdp_param_group is not None


@on_ranks(2)
def test_a_deleted_model_frees_its_memory_at_once() -> None:
    model = shard(build())
    train(model)
    units = [weakref.ref(unit) for unit in engine_of_model(model).units]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [unit() for unit in units] == [None] * len(units)
    finally:
        gc.enable()


@on_ranks(2)
def test_a_root_of_several_modules_merges_below_each() -> None:
    os.environ["MFSDP_MESSAGE_BYTES"] = str(9 * LAYER_BYTES)
    mesh = init_device_mesh("cpu", (2,))
    model, source = build(), build()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.first, model.last], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_same(train(model), train(source, alone=True))
    assert unit_names(model) == ["", "first..last", "layers.0..5"]


@on_ranks(2)
def test_the_units_that_a_backward_begins_with_are_short() -> None:
    os.environ.pop("MFSDP_MESSAGE_BYTES", None)
    model = Ordered(tuple(range(40)), 40)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)(torch.ones(2, FEATURES))
    engine = engine_of_model(model)
    assert engine is not None
    assert [len(unit.modules) for unit in engine.units] == [1, *[2] * 16, *[1] * 8]
