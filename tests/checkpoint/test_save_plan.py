"""A save that is planned from known layouts: its metadata are torch's, and no message has an entry for each tensor."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks.counting import counting
from megatron_fsdp.checkpoint import Checkpointer
from megatron_fsdp.checkpoint.checkpointer import collect
from megatron_fsdp.checkpoint.manifest import Manifest
from megatron_fsdp.checkpoint.naming import flatten
from megatron_fsdp.checkpoint.save import SealingPlanner, write_state
from megatron_fsdp.checkpoint.save_plan import Layouts, SavedTensor, boxes_of
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import BufferCut, MeshUse, ShardDescription
from tests.support.arrangements import hybrid_arguments, mesh_of
from tests.support.case import shard
from tests.support.dcp_contents import Stateful
from tests.support.on_ranks import of_ranks, on_ranks, once, refusal


def trained(sizes: tuple[int, int], strategy: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with odd shapes, a scalar, a buffer, and state of Adam, over (outer, inner) ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.PReLU(), nn.Linear(5, 3), nn.BatchNorm1d(3))
    options = {"zero_dp_strategy": strategy, "fsdp_unit_modules": [nn.Linear]}
    flat = {"device_mesh": mesh_of(sizes, ("outer", "inner")), "dp_shard_dim": "inner"}
    places = hybrid_arguments(*sizes) if sizes[0] > 1 else flat
    wrapped, optimizer = shard(model, lambda model: torch.optim.Adam(model.parameters()), **options, **places)
    wrapped(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return wrapped, optimizer


ASSIGN = Layouts.assign


def described(folder: Path) -> dict[str, Any]:
    """What torch reads in the metadata, with the boxes of a tensor in the order of their places."""
    found = FileSystemReader(folder).read_metadata()
    tensors = {
        key: (each.size, each.properties.dtype, sorted((*chunk.offsets, *chunk.sizes) for chunk in each.chunks))
        for key, each in found.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    places = {(index.fqn, index.offset) for index in found.storage_data}
    others = found.state_dict_metadata.keys() - tensors.keys()
    return {"tensors": tensors, "objects": others, "places": places, "paths": found.planner_data}


@pytest.mark.parametrize(("sizes", "strategy"), [((1, 4), 3), ((2, 2), 3), ((1, 4), 0)])
@on_ranks(4)
def test_the_metadata_are_those_of_torchs_planner(tmp_path: Path, sizes: tuple[int, int], strategy: int) -> None:
    state = collect(*trained(sizes, strategy), 1)
    layouts = Layouts.agreed(state, None)
    assert layouts is not None
    assert set(layouts.keys) == {key for key, value in flatten(state)[0].items() if isinstance(value, torch.Tensor)}
    for name in ("known", "gathered"):
        once((tmp_path / name).mkdir)
        with mock.patch.object(Layouts, "agreed", return_value=layouts if name == "known" else None):
            write_state(state, tmp_path / name)
    known, gathered = described(tmp_path / "known"), described(tmp_path / "gathered")
    assert known == gathered
    seals = [Manifest.read(tmp_path / name) for name in ("known", "gathered")]
    assert [seal is not None and seal.tensors for seal in seals] == [seals[0] and seals[0].tensors] * 2


@on_ranks(4)
def test_replicas_share_the_writing() -> None:
    """Of two ranks that hold a shard alike, the one that has less to write writes it."""
    state = collect(*trained((2, 2), 3), 1)
    layouts = Layouts.agreed(state, None)
    assert layouts is not None
    planner = SealingPlanner(None, layouts)
    planner.set_up_planner(state)
    own: Any = planner.create_local_plan()
    assignment = layouts.assign(of_ranks(own.bits))
    written = np.zeros(4, np.int64)
    for tensor, writers in zip(layouts.tensors, assignment.writers, strict=True):
        boxes = boxes_of(tensor.shape, tensor.description, 4)
        assert boxes.lengths.prod(axis=1).sum() == torch.Size(tensor.shape).numel()
        np.add.at(written, np.repeat(writers, boxes.counts), boxes.numel * tensor.properties.dtype.itemsize)
    for inner in (0, 1):  # ranks 0 and 2 hold the same shards, and ranks 1 and 3
        assert abs(int(written[inner] - written[inner + 2])) <= 7 * 5 * 4
    items = len(planner.finish_plan(own).items)
    assert items >= len(own.items)
    assert len(pickle.dumps(own)) < 2000


@on_ranks(4)
def test_the_plan_of_the_last_save_holds_while_nothing_changes(tmp_path: Path) -> None:
    """A second save plans nothing and sends less, another object is planned anew, and all have the saved values."""
    model, optimizer = trained((2, 2), 3)
    extra = {"counters": Stateful({"seen": 1})}
    found = []
    with Checkpointer(tmp_path) as checkpoints, mock.patch.object(Layouts, "assign", autospec=True) as assign:
        assign.side_effect = ASSIGN
        for iteration in range(1, 5):
            with torch.no_grad():
                for param in model.parameters():
                    param.fill_(float(iteration))
            if iteration == 4:
                extra["counters"].state["also"] = 2  # on all ranks, and another path
            with counting() as seen:
                checkpoints.save(iteration, model, optimizer, extra=extra)
            found.append((seen.object_bytes, assign.call_count))
        planned, repeated = found[0][0], found[1][0]
        assert [calls for _, calls in found] == ([1, 1, 1, 2] if dist.get_rank() == 0 else [0] * 4)
        assert planned - repeated > (600 if dist.get_rank() == 0 else 200)
        assert found[2][0] == repeated < found[3][0]
        for iteration in (3, 2, 4):
            read = {"counters": Stateful({"seen": 0})}
            checkpoints.load(model, optimizer, iteration=iteration, extra=read)
            assert all(bool((param.to_local() == iteration).all()) for param in model.parameters())
            assert read["counters"].state == {"seen": 1} | ({"also": 2} if iteration == 4 else {})
    names = [tmp_path / f"iter_000000{iteration}" for iteration in (1, 3)]
    assert described(names[0]) == described(names[1])


@on_ranks(2)
def test_ranks_with_other_tensors_are_left_to_torchs_planner(tmp_path: Path) -> None:
    rank = dist.get_rank()
    state = {"extra": {f"of_{rank}": torch.full((2,), float(rank))}}
    assert Layouts.agreed(state, None) is None
    once((tmp_path / "own").mkdir)
    write_state(state, tmp_path / "own")
    assert described(tmp_path / "own")["tensors"].keys() == {"extra.of_0", "extra.of_1"}


@on_ranks(2)
def test_a_state_that_one_rank_cannot_read_fails_on_all(tmp_path: Path) -> None:
    state: dict[str, Any] = {"weight": torch.zeros(2)}
    if dist.get_rank() == 1:
        state["again"] = state
    once((tmp_path / "cyclic").mkdir)
    assert "RecursionError" in refusal(write_state, state, tmp_path / "cyclic", error=CheckpointError)


def test_a_tensor_that_no_rank_holds_is_refused() -> None:
    description = ShardDescription((4,), MeshUse((2,), (0,)), (0,), BufferCut(0, 2, 2, 4))
    properties = torch.distributed.checkpoint.metadata.TensorProperties()
    layouts = Layouts([SavedTensor("w", ("w",), (4,), properties, description)], 2)
    everyone = layouts.bits_of({"w"})
    assert [writer.tolist() for writer in layouts.assign([everyone, everyone]).writers] == [[0, 1]]
    with pytest.raises(CheckpointError, match="w is not whole"):
        layouts.assign([everyone, layouts.bits_of(())])
