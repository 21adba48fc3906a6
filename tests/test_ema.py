"""The sharded average of weights equals one that is kept on one process, and moves between layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.ema import ShardedEMA
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.support.api_net import Layer, build, largest_difference, mesh, train, weights
from tests.support.counting import held_bytes
from tests.support.on_ranks import assert_equal_tensors, on_ranks

FROZEN = "layers.0.linear.bias"


def wrap(strategy: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> MegatronFSDP:
    model = build(seed).to(dtype)
    model.get_parameter(FROZEN).requires_grad_(requires_grad=False)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    return fully_shard_model(
        model, mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, mixed_precision_policy=policy
    )


def sgd(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return fully_shard_optimizer(optimizer) if isinstance(model, MegatronFSDP) else optimizer


def whole(model: MegatronFSDP, ema: ShardedEMA) -> dict[str, Tensor]:
    """The averages, whole, as the model shows them."""
    with ema.applied():
        return weights(model)


def on_one_process(steps: int, decay: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = build()
    model.get_parameter(FROZEN).requires_grad_(requires_grad=False)
    optimizer = sgd(model)
    average = weights(model)
    for step in range(steps):
        train(model, optimizer, 1, first=step)
        for name, value in weights(model).items():
            average[name].mul_(decay).add_(value, alpha=1.0 - decay)
    return average, weights(model)


@pytest.mark.full(short=["3-dtype2"])
@pytest.mark.parametrize(("strategy", "dtype"), [(0, torch.float32), (1, torch.float32), (3, torch.float64)])
@on_ranks(3)
def test_the_average_equals_one_process_and_is_swapped_in_and_out(strategy: int, dtype: torch.dtype) -> None:
    model = wrap(strategy)
    optimizer = sgd(model)
    ema = ShardedEMA(model, decay=0.5, dtype=dtype)
    for step in range(3):
        train(model, optimizer, 1, first=step)
        ema.update()
    before = weights(model)
    x = torch.ones(2, 5)
    with ema.applied(), torch.no_grad():
        shown, output = weights(model), model(x)
        with pytest.raises(ScheduleError, match="inside applied"):
            ema.update()
        with pytest.raises(ScheduleError, match="applied already"), ema.applied():
            pass
    with pytest.raises(KeyError), ema.applied():
        raise KeyError("in an evaluation")
    assert_equal_tensors(weights(model), before)
    average, _ = on_one_process(3, 0.5)
    assert largest_difference(shown, average) <= 2e-6
    plain = build()
    plain.load_state_dict({**shown, "offset": plain.offset})
    assert (output - plain(x)).abs().max() <= 2e-6
    train(model, optimizer, 1, first=3)  # goes on as if nothing had been swapped
    assert largest_difference(weights(model), on_one_process(4, 0.5)[1]) <= 2e-6
    ema.update(decay=0.0)
    assert_equal_tensors(whole(model, ema), weights(model))
    assert set(ema.state_dict()) == set(weights(model)) - {FROZEN}


@on_ranks(2)
def test_it_holds_shards_only_in_float32() -> None:
    """Bytes that an average takes, and the elements of this rank's trainable shards."""
    model = wrap(3, dtype=torch.bfloat16)
    before = held_bytes()
    ema = ShardedEMA(model)
    taken = held_bytes() - before
    elements = sum(p.to_local().numel() for p in model.parameters() if p.requires_grad)  # type: ignore[attr-defined]
    dtype = next(iter(ema.state_dict().values())).dtype
    assert taken == 4 * elements
    assert dtype == torch.float32


def save(strategy: int, folder: str) -> dict[str, Tensor]:
    model = wrap(strategy)
    ema = ShardedEMA(model, decay=0.5)
    train(model, sgd(model), 2)
    ema.update()
    dcp.save({"ema": ema.state_dict()}, checkpoint_id=folder)
    return whole(model, ema)


def load(strategy: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loaded by torch.distributed.checkpoint, and from full tensors."""
    model = wrap(strategy, seed=1)
    ema = ShardedEMA(model)
    state = {"ema": ema.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    ema.load_state_dict(state["ema"])
    loaded = whole(model, ema)
    other = ShardedEMA(model)
    other.load_state_dict({name: loaded[name] for name in other.state_dict()})
    return loaded, whole(model, other)


@pytest.mark.full(short=["saved0-loaded0"])
@pytest.mark.parametrize(("saved", "loaded"), [((2, 3), (3, 3)), ((3, 2), (2, 0))])
def test_it_is_saved_by_one_layout_and_loaded_by_another(
    run_ranks: RunRanks, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    before = run_ranks(saved[0], save, saved[1], str(tmp_path / "ema"))[0]
    del before[FROZEN]
    for by_checkpoint, from_full in run_ranks(loaded[0], load, loaded[1], str(tmp_path / "ema")):
        for found in (by_checkpoint, from_full):
            del found[FROZEN]
            assert_equal_tensors(found, before)


@on_ranks(2)
def test_what_means_nothing_is_refused() -> None:
    model = wrap(3)
    ema = ShardedEMA(model)
    first, *_ = state = ema.state_dict()
    for call, told in (
        (lambda: ShardedEMA(model, decay=1.0), "decay=1.0 is out of range"),
        (lambda: ShardedEMA(model, dtype=torch.int64), "dtype=torch.int64 cannot hold an average"),
        (lambda: ema.update(decay=-0.1), "decay=-0.1 is out of range"),
        (lambda: ema.load_state_dict({}), r"the averages do not fit: missing \['gain', 'head.bias'"),
        (
            lambda: ema.load_state_dict({**state, first: torch.zeros(1000)}),
            r"of shape \(1000,\) does not fit the average",
        ),
        (ShardedEMA(wrap(3)).update, "the model that this average follows has been deleted"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            call()
