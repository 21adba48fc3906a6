"""PyTorch's `fully_shard` on our engine, beside torch's own and one process on the whole batch."""

import copy
import io
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp.describe import describe
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import engine_of_module
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, ScheduleError, ShardOperationError
from megatron_fsdp.fsdp2 import FSDPModule, fully_shard, install, register_fsdp_forward_method
from tests.support.case import momentum as sgd
from tests.support.doors import (
    Before,
    assert_like_one_process,
    assert_same,
    backward,
    build,
    hybrid,
    ring,
    train,
    whole,
    wholes,
)
from tests.support.on_ranks import on_ranks
from tests.support.zoo import FEATURES, Branches, Layer, TinyTransformer, vector_case


def shard(model: Any, by: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    """Shard as torchtitan does: blocks, the last two as a list, the root."""
    for block in model.blocks:
        by(block, **options)
    ends = [model.norm if model.head.weight is not model.tokens.weight else model.tokens, model.head]
    by(ends, **options)
    return by(model, **options)


def sync(model: Any, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def all_reduce(model: Any, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)


def sync_blocks(model: Any, is_last: bool) -> None:
    for block in model.blocks:
        block.set_requires_gradient_sync(is_last, recurse=False)


def always(_model: Any, _is_last: bool) -> None:
    """Sync each backward, as without a word."""


CASES: dict[str, tuple[dict[str, Any], Before]] = {
    "plain": ({}, always),
    "accumulation": ({}, sync),
    "accumulation in blocks": ({}, sync_blocks),
    "kept gathered": ({"reshard_after_forward": False}, always),
    "resharded, the root, too": ({"reshard_after_forward": True}, sync),
    "changed while it runs": (
        {},
        lambda model, last: (model.set_reshard_after_forward(last), model.set_reshard_after_backward(last)),
    ),
}


@pytest.mark.parametrize(
    ("num_ranks", "case"), [(1, "plain"), (3, "accumulation"), *((2, case) for case in list(CASES)[2:])]
)
@on_ranks()
def test_training_is_one_process(case: str) -> None:
    options, before = CASES[case]
    assert_like_one_process(shard(build(), **options), build(), before)


@on_ranks(4)
def test_hybrid_meshes_are_one_process() -> None:
    assert_like_one_process(shard(build(), mesh=hybrid()), build(), all_reduce)


@on_ranks(2)
def test_tied_weights_in_a_list_are_one_process() -> None:
    assert_like_one_process(shard(build(tied=True)), build(tied=True))


@on_ranks(2)
def test_mixed_precision_is_that_of_torch() -> None:
    policy = {"reduce_dtype": torch.float32, "output_dtype": torch.float32}
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy)}
    ours, theirs = shard(build(), **options), shard(build(), torch_fully_shard, **options)
    seen: list[torch.dtype] = []
    ours.blocks[1].register_forward_pre_hook(
        lambda module, args: seen.extend((args[0].dtype, module.mlp.up.weight.dtype))
    )
    # Sums of two bfloat16 gradients, in another order.
    assert_same(train(ours), train(theirs), rtol=1e-2, atol=2e-3)
    assert set(seen) == {torch.bfloat16}
    assert {param.dtype for param in ours.parameters()} == {torch.float32}


@on_ranks(4)
def test_tensor_parallel_parameters_are_one_process() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build()
    for block in model.blocks:
        parallelize_module(block.mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh=mesh["dp"])
    before = model.blocks[0].mlp.up.weight
    assert before.full_tensor().equal(build().blocks[0].mlp.up.weight)
    assert_like_one_process(model, build(), data_ranks=2)


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="newer than torch 2.11")
@on_ranks(4)
def test_a_second_mesh_in_a_unit_is_that_of_torch() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    experts = _fsdp_common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)

    def place(param: nn.Parameter) -> Any:
        return _fsdp_common.ShardPlacementResult(Shard(0), experts) if hasattr(param, "is_expert") else None

    noted = []
    for by in (fully_shard, torch_fully_shard):
        model = build()
        for block in model.blocks:
            with torch.no_grad():
                block.mlp.up.weight.mul_(1 + dist.get_rank() % 2)  # other ranks hold other experts
            block.mlp.up.weight.is_expert = True
            by(block, shard_placement_fn=place)
            block.set_gradient_divide_factor(4.0)
            block.set_force_sum_reduction_for_comms(True)  # gloo has no other sum for torch's
        by(model)
        of_experts = [block.mlp.up.weight for block in model.blocks]
        assert {param.device_mesh.size() for param in of_experts} == {2}
        noted.append(train(model, steps=3, clip=None))
    assert_same(*noted)


@pytest.mark.unmerged
@on_ranks(4)
def test_a_hook_of_reduced_gradients_is_called_as_in_torch() -> None:
    noted, calls = [], []
    for by in (fully_shard, torch_fully_shard):
        model, sizes = shard(build(), by, mesh=hybrid()), list[int]()

        def hook(reduced: Tensor, sizes: list[int] = sizes) -> None:
            sizes.append(reduced.ndim)
            reduced.mul_(3)

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(hook)
        noted.append(train(model, before=sync))
        calls.append(sizes)
    assert_same(*noted)
    assert calls[0] == calls[1]
    assert set(calls[0]) == {1}


@pytest.mark.parametrize(("order", "mesh"), [(2.0, ring), (math.inf, hybrid)])
@on_ranks(4)
def test_the_total_norm_is_read_as_that_of_torch_and_as_a_plain_one(
    order: float, mesh: Callable[[], DeviceMesh]
) -> None:
    model, source = shard(build(), mesh=mesh()), build()
    for each in (model, source):
        backward(each)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order)
    wanted = nn.utils.clip_grad_norm_(source.parameters(), 0.1, norm_type=order)
    assert type(norm.full_tensor()) is Tensor
    for found in (norm, norm.full_tensor(), norm.item(), float(norm), norm.numpy(), norm + 0, pickle_of(norm)):
        torch.testing.assert_close(torch.as_tensor(found), wanted, rtol=1e-6, atol=0)
    assert f"{norm:.3f} {norm}" == f"{norm.item():.3f} {norm.item()}"
    dist.all_reduce(norm)  # as pipeline schedules do
    torch.testing.assert_close(norm.item(), 4 * wanted.item())
    assert_same(wholes(p.grad for p in model.parameters()), wholes(p.grad for p in source.parameters()))


def pickle_of(value: Tensor) -> Tensor:
    """What a file of it gives back; torch reads classes of its own only."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- the time before the first forward ------------------------------------------------------------------------------


@on_ranks(3)
def test_parameters_rest_as_torch_cuts_them_and_stay_the_same_objects() -> None:
    ours, theirs = shard(build()), shard(build(), torch_fully_shard)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert type(one) is type(other)
        assert one.placements == other.placements
        assert one.to_local().equal(other.to_local())
    held = list(ours.parameters())
    optimizer = sgd(ours)
    assert_same(train(ours, optimizer), train(build(), alone=True))
    assert all(
        one is other and isinstance(one, UnevenDTensor) for one, other in zip(held, ours.parameters(), strict=True)
    )


def to_empty(model: Any, source: nn.Module) -> None:
    """torchtitan, Lightning: memory first, values in place."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, value in zip(model.parameters(), source.parameters(), strict=True):
            local = torch.distributed.tensor.distribute_tensor(value.detach(), param.device_mesh, param.placements)
            param.copy_(local)


def by_assignment(model: Any, source: nn.Module) -> None:
    """accelerate, torchtune: a state dict of DTensors that torch has cut."""
    empty = model.state_dict()
    cut = {
        name: torch.distributed.tensor.distribute_tensor(value, empty[name].device_mesh, empty[name].placements)
        for name, value in source.state_dict().items()
    }
    model.load_state_dict(cut, assign=True)


def by_setting(model: Any, source: nn.Module) -> None:
    """transformers: a new parameter for each of the old ones."""
    for name, param in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        value = source.get_parameter(name).detach()
        chunks, rank = value.chunk(dist.get_world_size()), dist.get_rank()
        local = chunks[rank] if rank < len(chunks) else value[:0]
        assert local.shape == param._local_tensor.shape
        made = DTensor.from_local(
            local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride(), run_check=False
        )
        setattr(model.get_submodule(owner), attribute, nn.Parameter(made))


@pytest.mark.parametrize("fill", [to_empty, by_assignment, by_setting])
@on_ranks(3)
def test_meta_parameters_are_filled_as_clients_do(fill: Callable[[Any, nn.Module], None]) -> None:
    with torch.device("meta"):
        model = TinyTransformer()
    shard(model)
    with pytest.raises(ScheduleError, match=r"16 parameters|parameters are on the meta device"):
        model(torch.zeros(1, 4, dtype=torch.long))
    fill(model, build())
    assert_like_one_process(model, build())


# ---- calls between forwards -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_unshard_and_reshard_show_one_module() -> None:
    model, source = shard(build()), build()
    block = model.blocks[1]
    handle = block.unshard(async_op=True)
    handle.wait()
    for param, wanted in zip(block.parameters(), source.blocks[1].parameters(), strict=True):
        assert not isinstance(param, DTensor)
        assert param.equal(wanted)
    assert isinstance(model.blocks[0].mlp.up.weight, DTensor)
    block.reshard()
    model.unshard()
    assert model.positions.weight.equal(source.positions.weight)
    assert isinstance(block.mlp.up.weight, DTensor)
    model.reshard()
    assert isinstance(model.positions.weight, DTensor)
    assert_like_one_process(model, source)


def unit_names(model: nn.Module) -> list[str]:
    engine = engine_of_module(model)
    assert engine is not None
    return [unit.name for unit in engine.units]


class Wide(TinyTransformer):
    """Its embedding and head are as large as a block."""

    VOCABULARY = 150


@pytest.mark.unmerged
@pytest.mark.parametrize("case", ["plain", "accumulation"])
@on_ranks(2)
def test_a_large_embedding_and_head_are_units_of_the_root(case: str) -> None:
    def shard_blocks(reshard_after_forward: bool | None = None) -> Any:
        model = build(Wide)
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model, reshard_after_forward=reshard_after_forward)

    source, model = build(Wide), shard_blocks()
    assert_like_one_process(model, source, CASES[case][1])
    model.set_reshard_after_forward(True)
    blocks = [f"blocks.{index}" for index in range(3)]
    assert unit_names(model) == ["", "tokens", *blocks, "head"]
    assert list(model.state_dict()) == list(source.state_dict())
    model.unshard()
    torch.testing.assert_close(model.head.weight, source.head.weight)
    model.reshard()
    assert isinstance(model.head.weight, DTensor)
    handle = model.norm.register_forward_hook(lambda *_: nn.functional.linear(torch.ones(1, 16), model.head.weight))
    with pytest.raises(ShardOperationError, match=r"head.weight belongs .*reshard_after_forward=False"):
        model(torch.zeros(1, 4, dtype=torch.long))
    handle.remove()
    kept = shard_blocks(reshard_after_forward=False)
    kept(torch.zeros(1, 4, dtype=torch.long))
    assert unit_names(kept) == ["", *blocks]


@on_ranks(2)
def test_a_method_is_a_forward() -> None:
    model, source = shard(build()), build()
    register_fsdp_forward_method(model, "embed")
    tokens = torch.arange(6).view(2, 3)
    assert model.embed(tokens).equal(source.embed(tokens))
    assert isinstance(model.tokens.weight, DTensor)


@on_ranks(2)
def test_reset_goes_on_after_an_exception() -> None:
    model = shard(build())
    for register in (model.blocks[1].register_forward_hook, model.blocks[1].register_full_backward_hook):
        handle = register(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        handle.remove()
        model.reset_iter_state()
    assert_like_one_process(model, build())
    with pytest.raises(RuntimeError, match="root"):
        model.blocks[0].reset_iter_state()


@on_ranks(2)
def test_messages_name_the_calls_of_this_interface() -> None:
    model = shard(build())
    before, tokens = sgd(model), torch.zeros(1, 4, dtype=torch.long)
    handle = model.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens).sum().backward()
    handle.remove()
    with pytest.raises(ScheduleError, match=r"call reset_iter_state\(\) on the root module after an exception"):
        model(tokens)
    model.reset_iter_state()
    model.set_requires_gradient_sync(False)
    model(tokens).sum().backward()
    with (
        pytest.warns(UserWarning, match=r"call set_requires_gradient_sync\(True\)")
        if dist.get_rank() == 0
        else nullcontext()
    ):
        before.step()
    model = build()
    before = sgd(model)
    shard(model)(tokens).sum().backward()
    with pytest.raises(ConfigurationError, match=r"build the optimizer on model.parameters\(\) after the model"):
        before.step()


@on_ranks(2)
def test_cleared_gradients_free_their_memory_at_once() -> None:
    model, tokens = shard(build()), torch.zeros(1, 4, dtype=torch.long)
    optimizer = sgd(model)

    def step() -> tuple[int, int]:
        """The bytes of main gradients before and after the step; and those of the parameters, which are float32."""
        model(tokens).sum().backward()
        optimizer.step()
        return held(), sum(param.to_local().nbytes for param in model.parameters())

    def held() -> int:
        return sum(group.gradients.main.held_bytes for group in engine_of_module(model).groups())

    for clear in (lambda: optimizer.zero_grad(), lambda: model.zero_grad()):
        taken, owned = step()
        assert taken >= owned > 0
        clear()
        assert held() == 0
    step()
    kept = model.head.weight.grad
    optimizer.zero_grad()
    assert held() == 0  # the memory of what was kept is the program's
    assert kept.full_tensor().any()


@on_ranks(3)
def test_optimizers_step_on_local_tensors_and_show_their_state() -> None:
    model, source = shard(build()), build()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, eps=0.1, amsgrad=True) for each in (model, source)]
    seen = []

    def show(optimizer: torch.optim.Optimizer, *_unused: Any) -> None:
        seen.append({key: whole(value) for key, value in optimizer.state[model.head.weight].items()})

    optimizers[0].register_step_post_hook(show)
    adam = sys.modules["torch.optim.adam"]
    with patch.object(adam, "adam", wraps=vars(adam)["adam"]) as step:
        trained = train(model, optimizers[0])
        assert {type(each) for call in step.call_args_list for group in call.args[:5] for each in group} == {Tensor}
    assert_same(trained, train(source, optimizers[1], alone=True))
    assert len(seen) == 2
    wanted = optimizers[1].state[source.head.weight]
    assert seen[0].keys() == wanted.keys()
    assert_same([*seen[-1].values()], [*wanted.values()])
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert_same(train(model, optimizers[0]), train(source, optimizers[1], alone=True))


@on_ranks(2)
def test_what_a_step_does_not_use_has_no_gradient() -> None:
    both = fully_shard(build(Branches)), build(Branches)
    optimizers = [sgd(model) for model in both]
    for branch in ("even", "odd", None, "odd"):
        for model in both:
            for layer in model.layers:
                layer.branch = branch
        options: Any = {"steps": 1, "case": vector_case(Branches)}
        pairs = zip(both, optimizers, (False, True), strict=True)
        assert_same(*(train(model, optimizer, alone=alone, **options) for model, optimizer, alone in pairs))


@on_ranks(2)
def test_inference_may_come_first() -> None:
    model, tokens = shard(build()), torch.arange(6).view(2, 3)
    with torch.inference_mode():
        found = model(tokens)
    assert found.equal(build()(tokens))
    assert_like_one_process(model, build())


@on_ranks(2)
def test_the_root_too_stays_gathered_after_a_backward_if_asked() -> None:
    model, tokens = shard(build()), torch.zeros(1, 4, dtype=torch.long)
    for reshards in (True, False, True):
        model.set_reshard_after_backward(reshards)
        model(tokens).sum().backward()
        assert engine_of_module(model).scheduler.is_gathered(0) is not reshards


# ---- the class, and what is refused ---------------------------------------------------------------------------------


@on_ranks(2)
def test_the_class_is_that_of_torch() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[:1]) is nn.Sequential
    assert torch_fully_shard.state(model) is model._get_fsdp_state() is fully_shard.state(model)
    assert torch_fully_shard.state(model[0]) is None
    with pytest.raises(AssertionError):
        copy.deepcopy(model)


def refusals() -> Iterator[tuple[str, type[Exception], str, Callable[[TinyTransformer], object]]]:
    twice = "sharded already; shard a module once"
    yield "twice", ConfigurationError, twice, lambda model: fully_shard(fully_shard(model))
    yield (
        "ours, then torch's",
        ConfigurationError,
        "leave torch's fully_shard out",
        lambda m: torch_fully_shard(fully_shard(m)),
    )
    yield "torch's, then ours", ConfigurationError, r"sharded by FSDP2", lambda m: fully_shard(torch_fully_shard(m))
    yield "a container", ConfigurationError, "containers", lambda model: fully_shard(model.blocks)
    yield "twice in a list", ConfigurationError, "give each once", lambda m: fully_shard([m.head, m.head])
    yield "an empty list", ConfigurationError, "give each once", lambda _: fully_shard([])
    yield "no module", TypeError, "is no module", lambda _: fully_shard([3])
    yield "custom collectives", NotSupportedYetError, "engine's", lambda m: fully_shard(m).set_custom_all_gather(1)
    cube = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    yield "three dimensions", ConfigurationError, "1D or 2D", lambda model: fully_shard(model, mesh=cube)
    yield "a factor", ConfigurationError, "factor of 2", lambda model: fully_shard(model, reshard_after_forward=3)
    yield "another policy", TypeError, "mp_policy", lambda model: fully_shard(model, mp_policy="bf16")
    yield (
        "no dimension",
        ConfigurationError,
        "one of its dimensions",
        lambda model: fully_shard(model, shard_placement_fn=lambda _: Shard(5)),
    )
    yield (
        "no module to prefetch",
        ConfigurationError,
        "FSDPModule",
        lambda model: fully_shard(model).set_modules_to_forward_prefetch([nn.Linear(1, 1)]),
    )
    words = r"tied to Linear.weight.*fully_shard\(\[first, second\]\)"
    yield "ties of two calls", ConfigurationError, words, lambda _: head_and_root(build(tied=True))
    words = r"head of TinyTransformer has run already"
    yield "above what has run", ConfigurationError, words, lambda model: head_and_root(model, torch.zeros(1, 16))


def head_and_root(model: TinyTransformer, *inputs: Tensor) -> None:
    """Shard the head, call it where it has an input, and shard the whole model."""
    head: Any = fully_shard(model.head)
    for each in inputs:
        head(each)
    fully_shard(model)


SHARDED_BEFORE = ("twice", "ours, then torch's", "torch's, then ours", "custom collectives", "no module to prefetch")
SHARDED_BEFORE += ("ties of two calls", "above what has run")


@on_ranks(2)
def test_bad_input_is_one_sentence_and_changes_nothing() -> None:
    for name, kind, words, act in refusals():
        model = build()
        with pytest.raises(kind, match=words):
            act(model)
        if name not in SHARDED_BEFORE:
            assert type(model) is TinyTransformer, name
            assert not any(isinstance(param, DTensor) for param in model.parameters()), name


@on_ranks(2)
def test_ranks_that_shard_other_units_hear_of_it() -> None:
    model = build()
    if dist.get_rank():
        fully_shard(model.head)
    fully_shard(model)
    with pytest.raises(ConfigurationError, match="parameter"):
        model(torch.zeros(1, 4, dtype=torch.long))


@on_ranks(1)
def test_install_rebinds_and_restores() -> None:
    import torch.distributed._composable.fsdp as composable
    import torch.distributed.fsdp as fsdp

    with install():
        assert fsdp.fully_shard is composable.fully_shard is fully_shard
        with pytest.raises(ConfigurationError, match="installed already"):
            install()
        model = fsdp.fully_shard(build())
        model(torch.zeros(1, 4, dtype=torch.long))
        assert "as install() asks for" in str(describe(model))
    assert fsdp.fully_shard is composable.fully_shard is torch_fully_shard


ROWS = 8


@pytest.mark.full(short=["Schedule1F1B"])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
@on_ranks(4)
def test_stages_train_as_one_process(schedule: Any) -> None:
    """Two stages (or four, two on each rank) over two data-parallel ranks; three steps of four microbatches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, data_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    is_interleaved = schedule is ScheduleInterleaved1F1B
    number = 4 if is_interleaved else 2
    own, reference = (build(lambda: nn.Sequential(*(Layer() for _ in range(2 * number)))) for _ in range(2))
    group = mesh.get_group("pp")
    stages, parts = [], {}
    for index in range(stage, number, 2):
        part = parts[index] = own[2 * index : 2 * index + 2]
        for block in part:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])
        stages.append(PipelineStage(part, index, number, torch.device("cpu"), group=group))
    run = schedule(stages if is_interleaved else stages[0], 4, loss_fn=nn.functional.mse_loss)
    trained = [param for part in parts.values() for param in part.parameters()], [*reference.parameters()]
    optimizer, wanted = (torch.optim.AdamW(params, lr=1e-2) for params in trained)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs, targets = (torch.randn(2 * ROWS, FEATURES, generator=generator) for _ in range(2))
        mine = slice(data_rank * ROWS, (data_rank + 1) * ROWS)
        losses: list[Tensor] = []
        run.step(
            *([inputs[mine]] if stage == 0 else []),
            **({"target": targets[mine], "losses": losses} if stage == 1 else {}),
        )
        loss = nn.functional.mse_loss(reference(inputs), targets)
        loss.backward()
        if stage == 1:
            total = torch.stack(losses).mean()
            dist.all_reduce(total, group=mesh.get_group("dp"))
            torch.testing.assert_close(total / 2, loss.detach())
        for each in (optimizer, wanted):
            each.step()
            each.zero_grad()
    for index, part in parts.items():
        for param, expected in zip(part.parameters(), reference[2 * index : 2 * index + 2].parameters(), strict=True):
            torch.testing.assert_close(whole(param), expected.detach())
