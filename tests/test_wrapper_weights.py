"""Weights as the wrapper shows, gathers, saves and loads them."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_fsdp import MegatronFSDP, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError
from tests.support.api_net import build, largest_difference, mesh, train, weights, wrap
from tests.support.on_ranks import assert_equal_tensors, local_of, on_ranks
from tests.support.source_tree import ROOT


def raw_values(model: MegatronFSDP) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.raw_param.items()}


def kinds(model: MegatronFSDP) -> set[str]:
    """What hangs in the module tree now."""
    return {"sharded" if isinstance(param, DTensor) else "full" for param in model.module.parameters()}


# ---- gathering by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_weights_are_gathered_ahead_of_a_forward(strategy: int) -> None:
    """Three units (root, two layers) fit at once, so all can be had whole; a forward then needs nothing more."""
    model = wrap(strategy)
    model.start_param_sync("ignored", force_sync=True)
    assert largest_difference(raw_values(model), weights(build())) == 0.0
    before = model.traffic()
    with torch.no_grad():
        output = model(torch.ones(2, 5))
    assert model.traffic() == before
    assert (output - build()(torch.ones(2, 5))).abs().max() <= 1e-6
    train(model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)), 1)
    model.start_param_sync(force_dispatch=True)
    model.synchronize_param_gather()
    assert largest_difference(raw_values(model), weights(model)) == 0.0


@on_ranks(2)
def test_modules_can_be_given_either_kind_of_parameters_and_state_dicts_stay_sharded() -> None:
    model = wrap(3)
    sharded = [id(param) for param in model.parameters()]
    model._replace_param_with_raw_if_needed()
    assert (kinds(model), model.is_param_fsdp_distributed) == ({"full"}, False)
    assert all(dict(model.module.named_parameters())[name] is param for name, param in model.raw_param.items())
    assert {type(value).__name__ for key, value in model.state_dict().items() if "offset" not in key} == {
        "UnevenDTensor"
    }
    model._replace_param_with_distributed_if_needed()
    assert [id(param) for param in model.parameters()] == sharded
    seen = []
    handle = model.module.layers[0].linear.register_forward_hook(  # type: ignore[union-attr, index]
        lambda module, _args, _output: seen.append((type(module.weight.data), model.is_param_fsdp_distributed))
    )
    model(torch.ones(2, 5)).sum().backward()
    handle.remove()
    assert seen == [(Tensor, False)]
    assert (kinds(model), model.is_param_fsdp_distributed) == ({"sharded"}, True)


@on_ranks(2)
def test_broadcast_gives_every_rank_the_weights_of_the_first() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = wrap(0, build().to(dtype))
        before = weights(model)["gain"]
        with torch.no_grad():
            for param in model.parameters():
                assert isinstance(param, DTensor)
                param.to_local().add_(dist.get_rank())
        model.broadcast_params()
        now = weights(model)
        assert torch.equal(now["gain"], before)  # rank 0 has added nothing
        assert largest_difference(raw_values(model), {name: value.to(dtype) for name, value in now.items()}) == 0.0
    sharded = wrap(3)
    values = weights(sharded)
    sharded.broadcast_params()
    assert largest_difference(weights(sharded), values) == 0.0


# ---- state dicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_state_dicts_hold_dtensors_under_the_module_prefix_and_plain_buffers(strategy: int) -> None:
    expected = {f"module.{name}": value.shape for name, value in build().state_dict().items()}
    for described in (True, False):
        state = wrap(strategy, preproc_state_dict_for_dcp_ckpt=described).state_dict()
        assert [(name, value.shape) for name, value in state.items()] == list(expected.items())
        assert type(state.pop("module.offset")) is Tensor
        assert {(type(value).__name__, value.placements) for value in state.values()} == {
            ("UnevenDTensor", (Replicate(),) if strategy == 0 else (Shard(0),))
        }
        if strategy:
            assert {hasattr(local_of(value), "__create_chunk_list__") for value in state.values()} == {described}


# ---- moving and casting ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_moving_to_where_it_is_does_nothing_and_elsewhere_is_refused() -> None:
    model = wrap(3)
    before = weights(model)
    for whole in (model, model.module):
        for same in (
            whole.to("cpu"),
            whole.to("cpu:0"),
            whole.cpu(),
            whole.float(),
            whole.to(torch.device("cpu"), torch.float32),
        ):
            assert same is whole
    for move, target in (
        (model.half, "torch.float16 on cpu"),
        (model.module.half, "torch.float16 on cpu"),
        (lambda: model.module.to(torch.bfloat16), "torch.bfloat16 on cpu"),
        (next(model.module.children()).bfloat16, "torch.bfloat16 on cpu"),
        (lambda: model.to(dtype=torch.float64), "torch.float64 on cpu"),
        (lambda: model.to("meta"), "torch.float32 on meta"),
    ):
        told = re.escape(f"cannot be moved or cast (from torch.float32 on cpu to {target})")
        with pytest.raises(ValueError, match=f"{told}.*do that before fully_shard"):
            move()
    for whole in (model, model.module, torch.nn.Sequential(model)):
        with pytest.raises(
            ConfigurationError, match=r"cannot be given other memory \(of torch.float32 on cpu, by to_emp"
        ):
            whole.to_empty(device="cpu")
    assert largest_difference(weights(model), before) == 0.0
    assert kinds(model) == {"sharded"}


# ---- averages --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_printed_average_equals_one_process_and_is_swapped_in_and_out(tmp_path: Path) -> None:
    """The recipe of docs/integrations.md, which the refusals of copies name."""
    page = (ROOT / "docs/integrations.md").read_text().partition("## An average of the weights\n")[2]
    recipe = page.partition("```python\n")[2].partition("```")[0]
    shown: dict[str, dict[str, Tensor]] = {}
    for kind in ("sharded", "plain"):
        model: Any = build()
        if kind == "sharded":
            model = wrap(model=model)
            for copied in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
                with pytest.raises(ConfigurationError, match=r"recipe of docs/.*#an-average-of-the-weights"):
                    copied(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names: dict[str, Any] = {"torch": torch, "model": model}
        exec(recipe, names)
        for step in range(3):
            train(model, fully_shard_optimizer(optimizer) if kind == "sharded" else optimizer, 1, first=step)
            names["update_average"](0.5)
        before = weights(model)
        names["swap_average"]()
        shown[kind] = weights(model) | {"output": model(torch.ones(2, 5)).detach()}
        if kind == "sharded":
            dcp.save({"average": names["average"]}, checkpoint_id=tmp_path)
            saved = {name: value.full_tensor() for name, value in names["average"].items()}
            for value in names["average"].values():
                value.zero_()
            dcp.load({"average": names["average"]}, checkpoint_id=tmp_path)
            assert_equal_tensors({name: value.full_tensor() for name, value in names["average"].items()}, saved)
        names["swap_average"]()
        assert_equal_tensors(weights(model), before)
    assert largest_difference(shown["sharded"], shown["plain"]) <= 2e-6


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_asynchronous_saves_of_torch_hold_the_weights_as_of_the_call(tmp_path: Path, strategy: int) -> None:
    model = wrap(strategy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    train(model, optimizer, 1)
    before = {name: value.clone() for name, value in model.full_parameters().items()}
    group: Any = dist.new_group(backend="gloo")  # its thread communicates while the model does
    saving: Any = dcp.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path, process_group=group)
    train(model, optimizer, 1, first=1)
    saving.result()
    assert largest_difference(model.full_parameters(), before) > 0
    fresh = wrap(strategy)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    fresh.load_state_dict(state["model"])
    assert_equal_tensors(fresh.full_parameters(), before)


@pytest.mark.parametrize(("group", "told"), [("default", True), ("own", False)])
@on_ranks(2)
def test_an_asynchronous_save_over_the_group_of_the_model_is_warned_of(tmp_path: Path, group: str, told: bool) -> None:
    model = wrap(3)
    given: Any = dist.new_group(backend="gloo") if group == "own" else None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=tmp_path, process_group=given).result()
    words = [str(each.message) for each in seen if "process_group=dist.new_group" in str(each.message)]
    assert bool(words) == (told and dist.get_rank() == 0)


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_shards_that_torch_cut_evenly_load_into_the_model_and_into_its_inner_module(strategy: int) -> None:
    given = {name: torch.randn_like(value) for name, value in build().named_parameters()}
    for value in given.values():
        dist.broadcast(value, 0)
    even = {name: distribute_tensor(value, mesh(), [Shard(0)]) for name, value in given.items() if value.ndim}
    for prefix in ("module.", ""):
        model = wrap(strategy)
        target = model if prefix else model.module
        target.load_state_dict({prefix + name: value for name, value in even.items()}, strict=False)
        found = model.full_parameters()
        assert_equal_tensors({name: found[name] for name in even}, {name: given[name] for name in even})
