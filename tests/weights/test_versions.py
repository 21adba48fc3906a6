"""Versions and digests, by which an engine proves what it has."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.fsdp2 import fully_shard
from megatron_fsdp.weights import WeightSource
from tests.checkpoint.hf.hf_models import same_tensors
from tests.support.case import shard as shard_case
from tests.support.on_ranks import on_ranks, same_on_ranks
from tests.support.zoo import MODEL_CASES


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
