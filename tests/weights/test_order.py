"""Collectives of a pass are the same on all ranks, whatever the callers do between two tensors."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.weights import WeightSource
from tests.checkpoint.hf.hf_models import build, shard
from tests.support.counting import OpCounts
from tests.support.on_ranks import on_ranks, same_on_ranks
from tests.support.real_torchrun import real_torchrun
from tests.support.source_tree import ROOT


def slowly(source: WeightSource) -> None:
    for at, _ in enumerate(source):
        if at % 7 == 0:
            time.sleep(0.01 * dist.get_rank())


def some_at_once(source: WeightSource) -> None:
    """Rank 0 keeps them all, the others take them one by one or by layer."""
    if dist.get_rank() == 0:
        list(source)
    elif dist.get_rank() == 1:
        for _ in source.iter_groups():
            pass
    else:
        for _ in source:
            pass


@pytest.mark.parametrize("consume", [slowly, some_at_once])
@pytest.mark.parametrize("destination", ["all", 0])
@on_ranks(4)
def test_all_ranks_launch_the_same_collectives(consume: Callable[[WeightSource], None], destination: int | str) -> None:
    source = WeightSource(shard(build("llama")), bucket_bytes=2000, destination=destination)
    source.metadata()
    with OpCounts() as counts:
        consume(source)
    point_to_point = {"send", "recv_"}
    collectives = [(sent.group, sent.name) for sent in counts.sent if sent.name not in point_to_point]
    assert len(same_on_ranks(collectives)) > 10
    assert (len(collectives) < len(counts.sent)) == (destination == 0)


@on_ranks(4)
def test_the_sender_may_broadcast_over_another_group_between_two_tensors() -> None:
    """The deadlock of trainers whose other ranks run ahead: rank 0 blocks on a peer that takes its time."""
    model = shard(build("llama"))
    source, pair = WeightSource(model, bucket_bytes=1000), dist.new_group([0, 3])
    sizes = [meta.numel for meta in source.metadata()]
    if dist.get_rank() == 3:
        for (_, tensor), numel in zip(source, sizes, strict=True):
            received = torch.empty(numel, dtype=torch.bfloat16)
            dist.broadcast(received, 0, group=pair)
            assert tensor is not None
            assert torch.equal(received, tensor.flatten())
    else:
        for _, tensor in source:
            assert tensor is not None
            if dist.get_rank() == 0:
                time.sleep(0.002)
                dist.broadcast(tensor.flatten(), 0, group=pair)
    dist.destroy_process_group(pair)


@pytest.mark.full
def test_the_example_keeps_its_engine_up_to_date() -> None:
    printed = real_torchrun([str(ROOT / "examples" / "weights_to_engine.py")])
    lines = [f"the engine has version {at} of 7 tensors, as trained: True" for at in (1, 2, 3)]
    assert printed.splitlines() == lines
    assert all(line in (ROOT / "docs" / "inference.md").read_text() for line in lines)
