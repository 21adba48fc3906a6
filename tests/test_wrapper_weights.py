"""Weights as the wrapper shows, gathers, saves and loads them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from tests.conftest import RunRanks
from tests.support.api_net import Layer, build, largest_difference, mesh, train, weights
from tests.support.on_ranks import local_of, on_ranks

STRATEGIES = [0, 1, 2, 3]


def wrap(strategy: int, dtype: torch.dtype = torch.float32, **arguments: Any) -> MegatronFSDP:
    model = build().to(dtype)
    return fully_shard_model(model, mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, **arguments)


def raw_values(model: MegatronFSDP) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.raw_param.items()}


def plain_values() -> dict[str, Tensor]:
    return {name: param.detach() for name, param in build().named_parameters()}


def kinds(model: MegatronFSDP) -> set[str]:
    """What hangs in the module tree now."""
    return {"sharded" if isinstance(param, DTensor) else "full" for param in model.module.parameters()}


# ---- gathering by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_weights_are_gathered_ahead_of_a_forward(strategy: int) -> None:
    """Three units (root, two layers) fit at once, so all can be had whole; a forward then needs nothing more."""
    model = wrap(strategy)
    found: dict[str, Any] = {}
    model.start_param_sync("ignored", force_sync=True)
    found["forced"] = largest_difference(raw_values(model), plain_values())
    before = model.traffic()
    with torch.no_grad():
        output = model(torch.ones(2, 5))
    found["gathered again"] = model.traffic() != before
    found["output"] = (output - build()(torch.ones(2, 5))).abs().max().item()

    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 1)
    model.start_param_sync(force_dispatch=True)
    model.synchronize_param_gather()
    found["waited for"] = largest_difference(raw_values(model), weights(model))
    assert found.pop("output") <= 1e-6
    assert found == {"forced": 0.0, "gathered again": False, "waited for": 0.0}


@on_ranks(2)
def test_modules_can_be_given_either_kind_of_parameters_and_state_dicts_stay_sharded() -> None:
    model = wrap(3)
    sharded = [id(param) for param in model.parameters()]
    model._replace_param_with_raw_if_needed()
    found: dict[str, Any] = {
        "raw": kinds(model),
        "raw objects": all(dict(model.module.named_parameters())[n] is p for n, p in model.raw_param.items()),
        "flag": model.is_param_fsdp_distributed,
    }
    found["state dict"] = {type(value).__name__ for key, value in model.state_dict().items() if "offset" not in key}
    model._replace_param_with_distributed_if_needed()
    found["back"] = (kinds(model), [id(param) for param in model.parameters()] == sharded)
    found["flag back"] = model.is_param_fsdp_distributed
    seen = []
    handle = model.module.layers[0].linear.register_forward_hook(  # type: ignore[union-attr, index]
        lambda module, _args, _output: seen.append((type(module.weight.data).__name__, model.is_param_fsdp_distributed))
    )
    model(torch.ones(2, 5)).sum().backward()
    handle.remove()
    found["in forward"] = seen
    found["after"] = kinds(model)
    assert (found["flag"], found["state dict"]) == (False, {"UnevenDTensor"})
    assert (found["raw"], found["raw objects"]) == ({"full"}, True)
    assert found["back"] == ({"sharded"}, True)
    assert found["in forward"] == [("Tensor", False)]
    assert (found["after"], found["flag back"]) == ({"sharded"}, True)


@on_ranks(2)
def test_broadcast_gives_every_rank_the_weights_of_the_first() -> None:
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = wrap(0, dtype)
        with torch.no_grad():
            for param in model.parameters():
                assert isinstance(param, DTensor)
                param.to_local().add_(dist.get_rank())
        expected = weights(model)
        outcome = [torch.empty_like(expected["gain"]) for _ in range(2)]
        dist.all_gather(outcome, expected["gain"])
        model.broadcast_params()
        now = weights(model)
        found[str(dtype)] = (
            torch.equal(outcome[0], outcome[1]),
            torch.equal(now["gain"], outcome[0]),
            largest_difference(raw_values(model), {name: value.to(dtype) for name, value in now.items()}),
        )
    sharded = wrap(3)
    before = weights(sharded)
    sharded.broadcast_params()
    found["sharded"] = largest_difference(weights(sharded), before)
    assert found == {"torch.float32": (False, True, 0.0), "torch.bfloat16": (False, True, 0.0), "sharded": 0.0}


# ---- state dicts -----------------------------------------------------------------------------------------------------


def state_dict_contents(strategy: int) -> dict[str, Any]:
    model = wrap(strategy)
    state = model.state_dict()
    placements = {value.placements for value in state.values() if isinstance(value, DTensor)}
    described = {
        hasattr(local_of(value), "__create_chunk_list__") for value in state.values() if isinstance(value, DTensor)
    }
    plain = wrap(strategy, preproc_state_dict_for_dcp_ckpt=False).state_dict()
    undescribed = {hasattr(local_of(v), "__create_chunk_list__") for v in plain.values() if isinstance(v, DTensor)}
    return {
        "keys": list(state),
        "kinds": {key: type(value).__name__ for key, value in state.items()},
        "shapes": {key: tuple(value.shape) for key, value in state.items()},
        "placements": placements,
        "described": (described, undescribed),
    }


@pytest.mark.parametrize("strategy", [0, 3])
def test_state_dicts_hold_dtensors_under_the_module_prefix_and_plain_buffers(
    strategy: int, run_ranks: RunRanks
) -> None:
    expected = {f"module.{name}": tuple(value.shape) for name, value in build().state_dict().items()}
    for found in run_ranks(2, state_dict_contents, strategy):
        assert found["keys"] == list(expected)
        assert found["shapes"] == expected
        assert {key for key, kind in found["kinds"].items() if kind == "Tensor"} == {"module.offset"}
        assert {kind for key, kind in found["kinds"].items() if key != "module.offset"} == {"UnevenDTensor"}
        assert found["placements"] == {(Replicate(),) if strategy == 0 else (Shard(0),)}
        if strategy:
            assert found["described"] == ({True}, {False})


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_loading_a_state_dict_changes_main_and_compute_weights(strategy: int, bf16: bool) -> None:
    """Weights of another training into a fresh model; both what the optimizer and what compute sees must follow."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    source, target = wrap(strategy, dtype), wrap(strategy, dtype)
    train(source, fully_shard_optimizer(torch.optim.SGD(source.parameters(), lr=0.5)), 2)
    source.module.offset.fill_(7.0)  # type: ignore[operator]
    saved = {key: value.clone() for key, value in source.state_dict().items()}
    inputs = torch.ones(2, 5, dtype=dtype)
    different = (target(inputs) - source(inputs)).abs().max().item()
    result = target.load_state_dict(saved)
    found = {
        "different": different > 0,
        "keys": (result.missing_keys, result.unexpected_keys),
        "weights": largest_difference(weights(target), weights(source)),
        "output": (target(inputs) - source(inputs)).abs().max().item(),
        "sharded": kinds(target),
    }
    expected = {"different": True, "keys": ([], []), "weights": 0.0, "output": 0.0, "sharded": {"sharded"}}
    assert found == expected


# ---- moving and casting ----------------------------------------------------------------------------------------------


TARGETS = {
    "half": "torch.float16 on cpu",
    "bfloat16": "torch.bfloat16 on cpu",
    "double": "torch.float64 on cpu",
    "meta": "torch.float32 on meta",
}


@on_ranks(2)
def test_moving_to_where_it_is_does_nothing_and_elsewhere_is_refused() -> None:
    model = wrap(3)
    before = weights(model)
    same = [
        model.to("cpu"),
        model.cpu(),
        model.float(),
        model.to(torch.device("cpu"), torch.float32, non_blocking=True),
    ]
    found: dict[str, Any] = {
        "same": all(result is model for result in same),
        "kept": largest_difference(weights(model), before),
        "sharded": all(isinstance(param, DTensor) for param in model.parameters()),
    }
    for name, move in (
        ("half", model.half),
        ("bfloat16", lambda: model.to(torch.bfloat16)),
        ("double", lambda: model.to(dtype=torch.float64)),
        ("meta", lambda: model.to("meta")),
    ):
        try:
            move()
            found[name] = "accepted"
        except ValueError as error:
            found[name] = str(error)
    found["kept after"] = largest_difference(weights(model), before)
    assert (found["same"], found["kept"], found["sharded"], found["kept after"]) == (True, 0.0, True, 0.0)
    for name, target in TARGETS.items():
        assert f"cannot be moved or cast (from torch.float32 on cpu to {target})" in found[name]
        assert "do that before fully_shard" in found[name]


def train_after_inner_cast() -> tuple[str, float]:
    """What was raised by casting or by the step after it; how far that step moved what the model computes with."""
    model = wrap(3)
    before = weights(model)
    try:
        model.module.to(torch.bfloat16)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train(model, optimizer, 1)
    except Exception as error:  # noqa: BLE001 - any refusal will do
        return str(error), 0.0
    return "", largest_difference(weights(model), before)


def test_casting_the_inner_module_does_not_stop_training_in_silence(run_ranks: RunRanks) -> None:
    """The wrapper refuses casts; its inner module is a plain module, whose cast swaps the memory behind the shards."""
    for refusal, moved_by in run_ranks(2, train_after_inner_cast):
        assert refusal or moved_by > 1e-3
