"""`load_state_dict` of shards and of whole tensors, and all that it refuses; `torch.save` of state dicts."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.test_reshard import DENSE, HYBRID, ODD, TENSOR_PARALLEL, Places, trained, whole_state
from tests.conftest import RunRanks
from tests.support.case import Setting
from tests.support.hostile import saved_bytes
from tests.support.on_ranks import assert_equal_tensors, on_ranks
from tests.support.zoo import ModelCase

PLACES: Places = {
    **{f"strategy {strategy}": (3, Setting(strategy)) for strategy in (0, 3)},
    "HFSDP": HYBRID["HFSDP"],
    "FSDP x TP": TENSOR_PARALLEL["FSDP x TP"],
}


def case_at(place: str) -> ModelCase:
    return DENSE if "TP" in place else ODD


def whole_tensors(case: ModelCase, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {f"module.{name}": value for name, value in case.build().state_dict().items()}


@pytest.mark.full(short=["strategy 0", "HFSDP"])
@pytest.mark.parametrize(("place", "num_ranks"), [(place, ranks) for place, (ranks, _) in PLACES.items()], ids=PLACES)
@on_ranks()
def test_whole_tensors_load_and_may_be_mixed_with_shards(place: str) -> None:
    case, (_, setting) = case_at(place), PLACES[place]
    run = trained(case, setting, 0)
    wanted = whole_tensors(case, 3)
    result = run.model.load_state_dict(wanted)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert run.sharded is not None
    found = {f"module.{name}": value for name, value in run.sharded.full_parameters().items()}
    assert_equal_tensors(found, wanted)
    with torch.no_grad():
        run.case.loss(run.model, run.batch(1))  # the weights are installed
    half = {**wanted, **{key: value for key, value in run.model.state_dict().items() if "weight" in key}}
    run.model.load_state_dict(half)
    assert_equal_tensors({f"module.{name}": value for name, value in run.sharded.full_parameters().items()}, wanted)


class WithState(nn.Module):
    """A buffer, and state of its own that is no tensor of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(3))
        self.extra = "before"

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        self.extra = state


def wrap() -> MegatronFSDP:
    torch.manual_seed(0)
    model = WithState()
    wrapped, _ = fully_shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mixed_precision_policy=MixedPrecisionPolicy()
    )
    return wrapped


def everything(model: MegatronFSDP) -> dict[str, Tensor]:
    return {**model.full_parameters(), **{name: value.clone() for name, value in model.named_buffers()}}


@on_ranks(2)
def test_what_does_not_fit_is_listed_at_once_and_nothing_is_loaded() -> None:
    """Every kind of misfit at once, with an entry that fits: nothing of it is taken."""
    model = wrap()
    before = everything(model)
    good: dict[str, Any] = {key: torch.full_like(value, 9.0) for key, value in whole_state_of(model).items()}
    good["module._extra_state"] = "after"
    bad = {**good, "module.a.weight": torch.zeros(6, 5), "module.more": torch.zeros(1)}
    del bad["module.b.bias"]
    parts = ("nothing was loaded", "Missing key", "b.bias", "Unexpected key", "module.more", "size mismatch")
    for strict, told in ((True, parts), (False, ("size mismatch for module.a.weight",))):
        with pytest.raises(CheckpointError) as raised:
            model.load_state_dict(bad, strict=strict)
        assert [part for part in told if part not in str(raised.value)] == []
        assert_equal_tensors(everything(model), before)
        assert model.module.extra == "before"
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        model.load_state_dict({**good, "module.a.weight": "a text"})
    with pytest.raises(ConfigurationError, match="assign"):
        model.load_state_dict(good, assign=True)
    assert_equal_tensors(everything(model), before)
    result = model.load_state_dict({k: v for k, v in bad.items() if k != "module.a.weight"}, strict=False)
    assert result == (["module.a.weight", "module.b.bias"], ["module.more"])
    changed = [name for name, value in everything(model).items() if not torch.equal(value, before[name])]
    assert sorted(changed) == ["a.bias", "b.weight", "module.seen"]
    assert model.module.extra == "after"
    assert issubclass(CheckpointError, RuntimeError)  # which torch raises


def whole_state_of(model: MegatronFSDP) -> dict[str, Tensor]:
    """Every entry of a state dict, whole; buffers are named by the wrapper already."""
    return {f"module.{name.removeprefix('module.')}": value for name, value in everything(model).items()}


@on_ranks(2)
def test_the_missing_prefix_is_named_and_strict_false_only_where_it_helps() -> None:
    """The state dict of an unsharded model, as it is and as the error says; and one that has nothing in common."""
    model = wrap()
    torch.manual_seed(5)
    source = WithState()
    told = []
    for state, is_strict in (
        (source.state_dict(), True),
        (source.state_dict(), False),
        ({"other": torch.ones(1)}, True),
    ):
        with pytest.raises(CheckpointError) as raised:
            model.load_state_dict(state, strict=is_strict)
        told.append(str(raised.value))
    strict, loose, nothing = told
    assert strict == loose
    assert "lack the prefix 'module.' (such as 'a.weight')" in strict
    assert strict.endswith("load it with model.module.load_state_dict(state_dict)")
    assert "strict=False" not in strict + nothing
    assert nothing.endswith("load what state_dict() of the same model gave")
    more = {**model.state_dict(), "module.more": torch.ones(1), "module._extra_state": "after"}
    with pytest.raises(CheckpointError, match="or pass strict=False to load what fits and leave out the rest"):
        model.load_state_dict(more)
    assert model.module.extra == "before"
    model.module.load_state_dict(source.state_dict())
    assert_equal_tensors(model.full_parameters(), dict(source.named_parameters()))
    x = torch.ones(1, 4)
    torch.testing.assert_close(model(x), source(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="dict-like"):
        model.load_state_dict(None)  # type: ignore[arg-type]


# ---- torch's own functions -------------------------------------------------------------------------------------------

FULL: Places = {**{f"strategy {strategy}": (2, Setting(strategy)) for strategy in (0, 1, 2, 3)}, "HSDP": HYBRID["HSDP"]}


@pytest.mark.full(short=["strategy 3", "HSDP"])
@pytest.mark.parametrize(("place", "num_ranks"), [(place, ranks) for place, (ranks, _) in FULL.items()], ids=FULL)
@on_ranks()
def test_torch_sets_whole_state_dicts(place: str) -> None:
    """Whole tensors of every rank, or of the first alone, into a model and an optimizer, stepped or new."""
    _, setting = FULL[place]
    source = trained(ODD, setting, 0, 1)
    whole = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(source.model, source.optimizer, options=whole)
    expected = whole_state(source)
    for broadcast, batches in ((False, (2,)), (True, (2,)), (True, ())):
        target = trained(ODD, setting, *batches)
        has_it = not broadcast or dist.get_rank() == 0
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(target.model, copy.deepcopy(model) if has_it else {}, options=options)
        set_optimizer_state_dict(
            target.model, target.optimizer, copy.deepcopy(optimizer) if has_it else {}, options=options
        )
        assert_equal_tensors(whole_state(target), expected)
        for ours, theirs in zip(target.optimizer.state.values(), source.optimizer.state.values(), strict=True):
            assert torch.equal(ours["step"], theirs["step"])


# ---- torch.save ------------------------------------------------------------------------------------------------------


def through_a_file(value: Any) -> Any:
    return torch.load(io.BytesIO(saved_bytes(value)), weights_only=True)


@pytest.mark.full(short=["FSDP x TP"])
@pytest.mark.parametrize(("place", "num_ranks"), [(place, ranks) for place, (ranks, _) in PLACES.items()], ids=PLACES)
@on_ranks()
def test_torch_save_keeps_each_ranks_shards(place: str) -> None:
    case, (_, setting) = case_at(place), PLACES[place]
    run = trained(case, setting, 0, 1)
    expected = whole_state(run)
    model, optimizer = through_a_file(run.model.state_dict()), through_a_file(run.optimizer.state_dict())
    new = trained(case, setting)
    blank = through_a_file(new.optimizer.state_dict())
    assert blank["state"].keys() == optimizer["state"].keys()
    for key, value in run.model.state_dict().items():
        assert type(model[key]) is UnevenDTensor
        assert model[key].shard_spec == value.shard_spec
        assert model[key].placements == value.placements
    run.train(2)
    assert not all(torch.equal(value, expected[key]) for key, value in whole_state(run).items())
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    assert_equal_tensors(whole_state(run), expected)
    size = len(saved_bytes(run.model.state_dict()))
    elements = sum(value.to_local().numel() for value in run.model.state_dict().values())  # type: ignore[attr-defined]
    assert size < 4 * elements + 3000 * len(model)  # a rank's shards, not the buffers they are views of


def save_files(folder: str) -> None:
    run = trained(ODD, Setting(3), 0)
    torch.save(run.model.state_dict(), f"{folder}/model-{dist.get_rank()}")
    torch.save(run.optimizer.state_dict(), f"{folder}/optimizer-{dist.get_rank()}")


def load_first_file(strategy: int, folder: str) -> list[str]:
    """What the first rank has saved, on every rank, as after accelerate's `save_state`."""
    run = trained(ODD, Setting(strategy), 1)
    before, told = whole_state(run), []
    for part, target in (("model", run.model), ("optimizer", run.optimizer)):
        with pytest.raises(CheckpointError) as raised:
            target.load_state_dict(torch.load(f"{folder}/{part}-0", weights_only=True))
        told.append(str(raised.value))
    assert_equal_tensors(whole_state(run), before)
    return told


@pytest.mark.parametrize(
    ("saved", "loaded", "strategy", "why"),
    [
        (2, 2, 3, "rank 1 was given shards that it does not hold (those of the rank at (0,) on a mesh of shape (2,))"),
        (2, 1, 3, "rank 0 was given shards that it does not hold (those of the rank at (0,) on a mesh of shape (2,))"),
        (2, 2, 0, "rank 0 was given shards that it does not hold (its own under another strategy or other units)"),
    ],
    ids=["another rank's", "of more ranks", "of another strategy"],
)
def test_shards_of_others_are_refused_on_all_ranks(
    run_ranks: RunRanks, tmp_path: Path, saved: int, loaded: int, strategy: int, why: str
) -> None:
    run_ranks(saved, save_files, str(tmp_path))
    found = run_ranks(loaded, load_first_file, strategy, str(tmp_path))
    assert all(told == found[0] for told in found)
    for told in found[0]:
        assert told.startswith(why + ", and nothing was loaded: torch.save writes the shards of the rank that calls it")
        assert "torch.distributed.checkpoint, or with save_checkpoint and load_checkpoint" in told
