"""Weights travel to a stand-in engine in processes of its own."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import fully_shard
from megatron_fsdp.checkpoint.hf import save_hf
from megatron_fsdp.comm.collectives import SideStream
from megatron_fsdp.errors import MissingPackageError, RankError
from megatron_fsdp.weights import WeightSource, for_vllm, per_tensor_params, send
from megatron_fsdp.weights import source as weights_source
from tests.checkpoint.hf.hf_models import build, same_tensors, shard, step, stored
from tests.support.case import shard as shard_case
from tests.support.counting import OpCounts
from tests.support.inference_engine import StandIn
from tests.support.on_ranks import on_ranks, refusal, same_on_ranks
from tests.support.ordered_streams import OrderedStream, OrderedStreams, nothing, ordered_comm_streams
from tests.support.real_torchrun import real_torchrun
from tests.support.source_tree import ROOT
from tests.support.zoo import MODEL_CASES


def sharded(kind: str, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(kind, **changes)
    return fully_shard(model, torch.optim.AdamW(model.parameters(), lr=0.05))


@contextmanager
def engine(source: WeightSource, ranks: int = 1, **faults: int) -> Iterator[StandIn | None]:
    """An engine that the first trainer rank speaks to; None on the others."""
    source.metadata()
    found = None
    if dist.get_rank() == 0:
        found = StandIn({meta.name: meta.shape for meta in source.metadata()}, ranks, **faults)
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def sync(source: WeightSource, to: StandIn | None, packed_bytes: int = 3000) -> str:
    if to is None:
        return send(source, None, packed_bytes=packed_bytes)
    calls: Any = {"on_start": to.start, "on_update": to.update, "on_finish": to.finish}
    return send(source, to.group, packed_bytes=packed_bytes, **calls)


@pytest.mark.full(short=["llama-2-2"])
@pytest.mark.parametrize(("kind", "num_ranks", "engine_ranks"), [("llama", 2, 2), ("mixtral", 4, 1)])
@on_ranks()
def test_an_engine_has_what_files_have_after_every_sync(tmp_path: Path, kind: str, engine_ranks: int) -> None:
    model, optimizer = sharded(kind)
    source = WeightSource(model, destination=0, bucket_bytes=2000)
    with engine(source, engine_ranks) as served:
        for at in range(3):
            assert same_on_ranks(sync(source, served)) == str(at)
            save_hf(model, tmp_path / str(at), dtype=torch.bfloat16)
            if served is not None:
                assert served.stale(stored(tmp_path / str(at))) == []
                assert served.version == str(at)
            step(model, optimizer)


@on_ranks(2)
def test_what_does_not_come_stays_stale() -> None:
    """A tied head that is a parameter of its own in the engine's last stage needs its name on the wire."""
    model, optimizer = sharded("qwen_moe")
    both = WeightSource(model, tied="all", destination=0)
    with engine(both) as served:
        sync(both, served)
        step(model, optimizer)
        wanted: dict[str, Tensor | None] = dict(both)
        for source, stale in [
            (WeightSource(model, destination=0), ["lm_head.weight"]),
            (WeightSource(model, tied="all", destination=0, include="head|lay|emb"), ["model.norm.weight"]),
            (both, []),
        ]:
            step(model, optimizer)
            sync(source, served)
            wanted = dict(both)
            if served is not None:
                assert served.stale({name: t for name, t in wanted.items() if t is not None}) == stale


@pytest.mark.full
@pytest.mark.parametrize("faults", [{"rejects": 1}, {"dies_after": 9}])
@on_ranks(3)
def test_an_engine_that_rejects_or_dies_stops_all_ranks_and_the_next_one_is_complete(faults: dict[str, int]) -> None:
    model, optimizer = sharded("llama")
    source = WeightSource(model, destination=0, bucket_bytes=2000)
    with engine(source, **faults) as served:
        message = refusal(sync, source, served, error=RankError)
        assert "rank 0: " in message
        assert ("this engine takes no weights" if "rejects" in faults else "of 21 tensors were sent") in message
        if served is not None and "rejects" in faults:
            assert served.version == ""
    step(model, optimizer)
    with engine(source) as served:
        assert sync(source, served) == "1"
        found = dict(source)
        if served is not None:
            assert served.stale(found) == []  # type: ignore[arg-type]


@on_ranks(2)
def test_other_libraries_take_it() -> None:
    model, _ = sharded("llama")
    tensors, config = per_tensor_params(model, bucket_bytes=3000)
    assert config is None
    assert same_tensors(dict(tensors), dict(WeightSource(model)))  # type: ignore[arg-type]
    with pytest.raises(MissingPackageError, match="for_vllm needs the package vllm, which is not installed"):
        for_vllm(WeightSource(model))


THEIRS = """
from abc import ABC, abstractmethod
from collections import namedtuple

ParamMeta = namedtuple("ParamMeta", "name dtype shape")

class WeightSource(ABC):
    @abstractmethod
    def metadata(self): ...
    @abstractmethod
    def __iter__(self): ...
"""


@on_ranks(2)
def test_vllm_gets_an_instance_of_its_own_class(tmp_path: Path) -> None:
    package = tmp_path / str(dist.get_rank()) / "vllm" / "distributed" / "weight_transfer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(THEIRS)
    for folder in package.parents[:2]:
        (folder / "__init__.py").touch()  # neither imports what is below it, as with vLLM
    source = WeightSource(sharded("llama")[0], destination=0)
    sys.path.insert(0, str(package.parents[2]))
    try:
        theirs = for_vllm(source)
        abstract = sys.modules["vllm.distributed.weight_transfer"].WeightSource
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
    assert isinstance(theirs, abstract)
    assert [tuple(meta) for meta in theirs.metadata()] == [
        (meta.name, meta.dtype, meta.shape) for meta in source.metadata()
    ]
    assert same_tensors(*(({n: t for n, t in each if t is not None}) for each in (theirs, source)))
    assert theirs.held_names() == source.held_names()
    assert [names for names, _ in theirs.iter_groups()] == (source.groups() if dist.get_rank() == 0 else [])


# ---- collectives of a pass are the same on all ranks, whatever the callers do between two tensors --------------------


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


@pytest.mark.parametrize(("consume", "destination"), [(slowly, 0), (some_at_once, "all")])
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


class OrderedSide(SideStream):
    """A side stream of the simulated device."""

    streams: OrderedStreams

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = self.streams.Stream(device, -1)

    def hand_over(self, tensor: torch.Tensor) -> None:
        self.streams._memory_of(tensor).owner = self.streams.current_stream(self.device)


def not_waited_for() -> AbstractContextManager[Any]:
    return patch.object(OrderedStream, "synchronize", nothing)


def reads_weights_at_once() -> AbstractContextManager[Any]:
    return patch.object(OrderedStream, "wait_stream", nothing)


@pytest.mark.full(short=["3-nullcontext", "1-not_waited_for", "3-reads_weights_at_once"])
@pytest.mark.parametrize(
    ("strategy", "fault"), [(1, nullcontext), (3, nullcontext), (1, not_waited_for), (3, reads_weights_at_once)]
)
@on_ranks(2)
def test_nothing_is_in_flight_when_a_tensor_is_yielded(strategy: int, fault: Callable[[], Any]) -> None:
    """On a device with streams: the caller reads each tensor at once, and trains between two passes."""
    case = MODEL_CASES["transformer"]
    with ordered_comm_streams() as streams, ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "current_stream", streams.current_stream))
        stack.enter_context(patch.object(torch.cuda, "stream", streams.stream))
        stack.enter_context(patch.object(OrderedSide, "streams", streams, create=True))
        stack.enter_context(patch.object(weights_source, "SideStream", OrderedSide))
        model, optimizer = shard_case(case, zero_dp_strategy=strategy)
        source = WeightSource(model, bucket_bytes=500)
        for step in range(2):
            case.loss(model, case.make_batch(4, torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            with fault():
                for _, tensor in source:
                    assert tensor is not None
                    assert tensor.float().sum().isfinite()
                    del tensor
    assert (not streams.findings) == (fault is nullcontext), streams.findings


@pytest.mark.full
def test_the_example_keeps_its_engine_up_to_date() -> None:
    printed = real_torchrun([str(ROOT / "examples" / "weights_to_engine.py")])
    lines = [f"the engine has version {at} of 7 tensors, as trained: True" for at in (1, 2, 3)]
    assert printed.splitlines() == lines
    assert all(line in (ROOT / "docs" / "inference.md").read_text() for line in lines)
