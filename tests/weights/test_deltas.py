"""Local shards, and only what has changed since what was committed last."""

import hashlib
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp import MegatronFSDP, fully_shard_model
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.fsdp2 import fully_shard
from megatron_fsdp.weights import Patch, Shard, WeightSource
from tests.checkpoint.hf.hf_models import build, same_tensors
from tests.checkpoint.hf.hf_models import shard as shard_hf
from tests.support.arrangements import hybrid_arguments, mesh_of
from tests.support.case import shard as shard_case
from tests.support.counting import OpCounts
from tests.support.experts import Experts, ExpertsKind, ListedExperts
from tests.support.on_ranks import of_ranks, on_ranks, refusal, same_on_ranks
from tests.support.zoo import MODEL_CASES
from tests.weights.test_passes import on_two_dimensions


def check_tiling(source: WeightSource) -> None:
    """Over all ranks the contributed ranges cover every tensor once, and hold what a pass has."""
    whole = {name: tensor for name, tensor in source if tensor is not None}
    with OpCounts() as counts:
        shards = list(source.local_shards())
    assert counts.sent == []
    of_name: dict[str, list[Shard]] = {}
    for shard in shards:
        flat = whole[shard.name].reshape(-1)
        assert torch.equal(shard.tensor, flat[shard.offset : shard.offset + shard.numel])
        assert shard.tensor.dtype == flat.dtype
        assert shard.full_shape == tuple(whole[shard.name].shape)
        of_name.setdefault(shard.name, []).append(shard)
    own = [(name, s.offset, s.numel) for name, of in of_name.items() for s in of if s.contributes]
    every = sorted(each for of_rank in of_ranks(own) for each in of_rank)
    for name, tensor in whole.items():
        end = 0
        for _, offset, numel in (each for each in every if each[0] == name):
            assert offset == end, name
            end += numel
        assert end == tensor.numel(), name


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_local_shards_tile_the_tensors_of_files(strategy: int) -> None:
    check_tiling(WeightSource(shard_hf(build("mixtral"), strategy)))
    check_tiling(WeightSource(shard_hf(build("gpt2"), strategy), dtype=None, tied="all"))


@on_ranks(2)
def test_local_shards_of_models_that_others_have_sharded_tile_them() -> None:
    plain, model = nn.Linear(3, 5), build("mixtral")
    check_tiling(WeightSource(plain))
    check_tiling(WeightSource(torch_fully_shard(model, mesh=mesh_of((2,), ("dp",)))))


@pytest.mark.full(short=["None", "ListedExperts"])
@pytest.mark.parametrize("kind", [None, Experts, ListedExperts])
@on_ranks(4)
def test_local_shards_on_meshes_of_two_dimensions_tile_them(kind: ExpertsKind | None) -> None:
    if kind is None:
        model, _ = shard_case(MODEL_CASES["transformer"], **hybrid_arguments(2, 2))
        check_tiling(WeightSource(model))
    check_tiling(WeightSource(on_two_dimensions(kind)[1]))


def apply(to: dict[str, Tensor], patches: Iterator[Patch]) -> list[tuple[str, int | None]]:
    """Apply patches; returns names and numbers of elements, None for a whole tensor."""
    seen = []
    for patch_ in patches:
        if patch_.indices is None:
            to[patch_.name] = patch_.values
        else:
            assert patch_.indices.dtype == torch.int32
            to[patch_.name].reshape(-1)[patch_.indices.long()] = patch_.values
        seen.append((patch_.name, None if patch_.indices is None else patch_.indices.numel()))
    return seen


def write(model: MegatronFSDP, seed: int) -> None:
    """Change a few elements of some weights, to values that are hard to compare, and one whole tensor."""
    generator = torch.Generator().manual_seed(seed)
    with model.full_parameters_context(writeback=True):
        for at, param in enumerate(model.module.parameters()):
            if at % 3 == 0:
                flat = param.data.reshape(-1)
                places = torch.randint(flat.numel(), (4,), generator=generator)
                flat[places] = torch.tensor([math.nan, -0.0, 0.0, 1.0])
            elif at % 7 == 0:
                param.data.add_(1)


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.view(torch.int16) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("strategy", "snapshot"), [(0, "device"), (2, "cpu"), (3, "device")])
@on_ranks(2)
def test_a_full_pass_and_deltas_are_a_full_pass_bit_for_bit(strategy: int, snapshot: str) -> None:
    model = shard_hf(build("mixtral"), strategy)
    source = WeightSource(model, snapshot=snapshot, bucket_bytes=3000)
    held = {name: tensor.clone() for name, tensor in source if tensor is not None}
    source.commit()
    for seed in range(3):
        write(model, 2 * seed)
        write(model, 2 * seed + 1)  # several changes between two syncs are all in
        seen = same_on_ranks(apply(held, source.changed(source.version - 2)))
        assert {count is None for _, count in seen} == {True, False}
        assert len(seen) < len(held)
        source.commit()
        whole = dict(WeightSource(model))
        assert same_tensors(bits(held), bits(whole))  # type: ignore[arg-type]
    assert list(source.changed()) == []


@on_ranks(2)
def test_what_was_not_committed_comes_again_and_what_does_not_show_on_the_wire_does_not_come() -> None:
    model = fully_shard_model(nn.Linear(64, 64, bias=False))
    source = WeightSource(model, snapshot="device")
    list(source)
    source.commit()
    with torch.no_grad():
        model.module.weight.mul_(1 + 2**-20)  # below what bfloat16 resolves, but for a few
    small = sum(each.values.numel() for each in source.changed())
    assert small < 64 * 64 // 50
    source.commit()
    weight = dict(model.full_parameters())["weight"].clone()
    for _ in range(2):  # not committed in between
        with model.full_parameters_context(writeback=True):
            model.module.weight.data[3, 5] += 1
        with OpCounts() as counts:
            (found,) = source.changed()
        assert found.indices is not None
        assert found.indices.tolist() == [3 * 64 + 5]
        assert sum(sent.num_bytes for sent in counts.sent) < 1024
    assert found.values.item() == pytest.approx(weight[3, 5].item() + 2, abs=0.02)
    with patch("megatron_fsdp.weights.source.MAX_NUMEL", 64):  # indices would not fit
        (found,) = source.changed()
    assert found.indices is None


@on_ranks(2)
def test_deltas_without_their_base_are_refused() -> None:
    model = fully_shard_model(nn.Linear(8, 8))
    source = WeightSource(model, snapshot="device")

    def refused(since: int | None = None) -> str:
        return refusal(lambda: list(source.changed(since)), error=ScheduleError)

    assert "there is no snapshot to compare with; give snapshot=" in refused()
    assert "no pass was completed since the last commit()" in refusal(source.commit, error=ScheduleError)
    begun: Any = iter(source)
    next(begun)
    begun.close()
    assert "no pass was completed since the last commit()" in refusal(source.commit, error=ScheduleError)
    list(source)
    assert "there is no snapshot" in refused()
    source.commit()
    assert list(source.changed(0)) == []
    for given, words in ((-1, "dense_above=-1; give a part"), (dist.get_rank(), "ranks differ: dense_above is 0 on ")):
        assert words in refusal(lambda part: list(source.changed(dense_above=part)), given)
    with pytest.raises(ConfigurationError, match="has no version; give what state_dict"):
        source.load_state_dict({})
    assert "the receiver has version 7, and the snapshot is of version 0; send everything first" in refused(since=7)
    source.close()
    assert "there is no snapshot" in refused()
    assert "snapshot='disk' with adapters='refuse'; give snapshot='off', 'device' or 'cpu'" in refusal(
        lambda: WeightSource(model, snapshot="disk").metadata()
    )


# ---- versions and digests, by which an engine proves what it has -----------------------------------------------------


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    case = MODEL_CASES["transformer"]
    case.loss(model, case.make_batch(4, torch.Generator().manual_seed(dist.get_rank()))).backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_the_version_counts_changes_and_goes_on_after_a_checkpoint() -> None:
    model, optimizer = shard_case(MODEL_CASES["transformer"])
    source, versions = WeightSource(model), []

    def note(*_: object) -> None:
        versions.append((same_on_ranks(source.version), source.label))

    note()
    for _ in range(2):
        step(model, optimizer)
        note()
    list(source)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    note()
    list(source)
    note(model.load_state_dict(model.state_dict()))
    note(model.reset())
    with model.full_parameters_context():
        pass
    note()
    assert versions == [(at, str(at)) for at in (0, 1, 2, 3, 4, 4, 4)]
    other = WeightSource(shard_case(MODEL_CASES["transformer"], zero_dp_strategy=1)[0])
    other.load_state_dict(source.state_dict())
    assert (other.version, other.label) == (4, "4")


@on_ranks(2)
def test_the_version_of_a_model_that_others_have_sharded_counts_passes_after_changes() -> None:
    model = nn.Linear(2, 2)
    source = WeightSource(model)
    assert source.version == 0
    with torch.no_grad():
        model.weight.zero_()
    assert [source.version, len(list(source)), source.version, source.version] == [1, 2, 1, 1]


@on_ranks(2)
def test_a_model_of_fsdp2_is_read_before_and_after_its_first_forward() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    for module in (*model, model):
        fully_shard(module)
    source = WeightSource(model, dtype=None, snapshot="device")
    optimizer = torch.optim.SGD(model.parameters())

    def check() -> int:
        wanted = {name: param.full_tensor().detach() for name, param in model.named_parameters()}  # type: ignore[operator]
        assert same_tensors(dict(source), wanted)  # type: ignore[arg-type]
        return same_on_ranks(source.version)

    versions = [check()]
    source.commit()
    model(torch.ones(2, 7)).sum().backward()
    versions.append(check())
    source.commit()
    optimizer.step()
    assert {patch.name for patch in source.changed()} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [*versions, check()] == [0, 1, 2]


@on_ranks(2)
def test_digests_are_sha256_of_the_bytes_on_the_wire() -> None:
    model: MegatronFSDP = shard_case(MODEL_CASES["transformer"])[0]
    source = WeightSource(model, bucket_bytes=1000)
    wanted = {
        name: hashlib.sha256(t.bfloat16().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in model.full_parameters().items()
    }
    assert same_on_ranks(source.digest()) == wanted
    assert source.digest({"tokens.weight"}) == {"tokens.weight": wanted["tokens.weight"]}
