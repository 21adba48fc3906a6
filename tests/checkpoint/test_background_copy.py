"""The copy that is saved in the background: equal, apart from its source, and made in the same memory again."""

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from megatron_fsdp.checkpoint.background import StagingBuffers
from megatron_fsdp.dtensor.shard_spec import describe_chunks
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box
from tests.conftest import RunRanks
from tests.support.case import shard
from tests.support.dcp_contents import Stateful
from tests.support.on_ranks import assert_equal_tensors, local_of, on_ranks
from tests.support.zoo import MODEL_CASES


def tensors() -> dict[str, Tensor]:
    flat = torch.arange(100.0)
    return {
        "float": torch.randn(7, 3),
        "bf16": torch.randn(5).bfloat16(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "int": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "stretched": torch.tensor(2.0).expand(3, 3),
        "first half": flat[:50],
        "second half": flat[50:],
        "parameter": nn.Parameter(torch.randn(2, 2)),
    }


def test_a_copy_is_equal_and_apart_and_each_tensor_owns_just_its_bytes() -> None:
    state = tensors()
    buffers = StagingBuffers()
    copied = buffers.copy(state)
    assert buffers.staged_bytes == sum(tensor.nbytes for tensor in state.values())
    assert buffers.staged_bytes <= buffers.reserved_bytes <= buffers.staged_bytes + 64 * len(state)
    before = {key: tensor.detach().clone() for key, tensor in state.items()}
    with torch.no_grad():
        for tensor in state.values():
            tensor.copy_(torch.zeros_like(tensor)) if tensor.stride() != (0, 0) else None
    for key, tensor in copied.items():
        assert tensor.dtype == before[key].dtype
        assert tensor.shape == before[key].shape
        assert torch.equal(
            tensor.float() if key == "float8" else tensor, before[key].float() if key == "float8" else before[key]
        ), key
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.requires_grad


class NeverLoaded(Stateful):
    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def test_nesting_objects_and_what_has_a_state_dict() -> None:
    counter, stream, names = NeverLoaded({"count": torch.tensor(3), "names": ["a"]}), io.BytesIO(b"bytes"), {"a", "b"}
    module = nn.Linear(2, 2)
    state = {
        "nested": OrderedDict(list=[torch.ones(2), {"deep": (torch.zeros(1), "text")}], none=None),
        "counter": counter,
        "module": module,
        "stream": stream,
        "names": names,
    }
    copied = StagingBuffers().copy(state)
    counter.state["count"] += 1
    names.add("c")
    module.weight.data.zero_()
    assert copied["nested"]["none"] is None
    assert copied["nested"]["list"][0].tolist() == [1.0, 1.0]
    assert copied["nested"]["list"][1]["deep"][0].tolist() == [0.0]
    assert copied["nested"]["list"][1]["deep"][1] == "text"
    assert copied["counter"]["count"].item() == 3
    assert copied["counter"]["names"] == ["a"]
    assert copied["module"]["weight"].count_nonzero() == 4
    assert copied["stream"].getvalue() == b"bytes"
    assert copied["names"] == {"a", "b"}


def test_the_next_copy_uses_the_same_memory() -> None:
    buffers = StagingBuffers(arena_bytes=1024)
    state = {"large": torch.randn(1000), "a": torch.randn(100), "b": torch.randn(100), "c": torch.randn(3)}
    first = buffers.copy(state)
    places = {key: tensor.data_ptr() for key, tensor in first.items()}
    reserved = buffers.reserved_bytes
    again = {key: tensor + 1 for key, tensor in state.items()}  # made anew, as state dicts are
    second = buffers.copy(again)
    assert {key: tensor.data_ptr() for key, tensor in second.items()} == places
    assert buffers.reserved_bytes == reserved
    assert all(torch.equal(second[key], again[key]) for key in again)
    smaller = buffers.copy({"a": torch.ones(100)})
    assert buffers.staged_bytes == 400
    assert smaller["a"].data_ptr() in places.values()
    grown = buffers.copy({**state, "more": torch.randn(5000)})
    assert torch.equal(grown["large"], state["large"])
    assert buffers.staged_bytes == sum(tensor.nbytes for tensor in state.values()) + 20_000


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")], ids=["sparse", "meta"])
def test_other_kinds_of_tensors_are_refused(tensor: Tensor) -> None:
    with pytest.raises(CheckpointError, match="cannot be copied for a background save; save it in the foreground"):
        StagingBuffers().copy({"a": {"b": tensor}})


# ---- DTensors -------------------------------------------------------------------------------------------------------


def chunks_and_elements(tensor: Any) -> list[tuple[Any, ...]]:
    """All that torch asks for a save: boxes, and the elements in them."""
    found = []
    for item in tensor.__create_write_items__("name", tensor):
        elements = tensor.__get_tensor_shard__(MetadataIndex("name", item.tensor_data.chunk.offsets))
        found.append((item.tensor_data.chunk, item.tensor_data.size, elements.clone()))
    return found


def same(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]]) -> bool:
    return len(left) == len(right) and all(
        a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(left, right, strict=True)
    )


def assert_copied(state: dict[str, Any]) -> None:
    before = {key: chunks_and_elements(tensor) for key, tensor in state.items()}
    buffers = StagingBuffers()
    copied = buffers.copy(state)
    assert buffers.staged_bytes == sum(tensor.to_local().nbytes for tensor in state.values())
    with torch.no_grad():
        for tensor in state.values():
            tensor.to_local().zero_()
    for key, tensor in state.items():
        assert same(chunks_and_elements(copied[key]), before[key]), key
        assert (type(copied[key]), copied[key].placements) == (type(tensor), tensor.placements), key
        # Tools that look at the local tensor find a description there, too.
        described = hasattr(local_of(tensor), "__create_chunk_list__")
        assert hasattr(local_of(copied[key]), "__create_chunk_list__") == described, key
        assert not described or same(chunks_and_elements(local_of(copied[key])), before[key]), key


@on_ranks(2)
def test_copies_of_sharded_tensors_answer_torchs_questions_alike() -> None:
    case = MODEL_CASES["odd_shapes"]
    for options in ({}, {"preproc_state_dict_for_dcp_ckpt": False}):
        state = shard(case, **options)[0].state_dict()
        assert any(isinstance(tensor, UnevenDTensor) for tensor in state.values())
        assert_copied(state)
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    local = torch.arange(3.0 + rank)
    uneven = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((7,)), stride=(1,))
    stock = {
        "described": describe_chunks(uneven, [Box((3 * rank,), (3 + rank,))]),
        "even": DTensor.from_local(torch.randn(2, 3), mesh, [Shard(0)]),
        "transposed": DTensor.from_local(torch.randn(2, 3).t(), mesh, [Shard(1)]),
        "replicated": DTensor.from_local(torch.ones(4), mesh, [Replicate()]),
    }
    assert_copied(stock)


@pytest.mark.gpu
def test_copies_from_a_device_hold_what_was_there_when_they_were_asked_for(run_ranks: RunRanks) -> None:
    run_ranks(1, copy_from_device, device_type="cuda")


def copy_from_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    numbers = torch.arange(16.0 * 1024 * 1024, device=device)
    state = {"large": numbers.clone(), "slice": numbers[5:105], "host": torch.ones(3)}
    buffers = StagingBuffers()
    copied = buffers.copy(state)
    for tensor in state.values():
        tensor.zero_()  # queued behind the copies, which may still be under way
    buffers.wait_until_copied()
    wanted = {"large": torch.arange(16.0 * 1024 * 1024), "slice": torch.arange(5.0, 105.0), "host": torch.ones(3)}
    assert_equal_tensors(copied, wanted)
    assert copied["large"].is_pinned()
    assert not any(tensor.is_cuda for tensor in copied.values())
