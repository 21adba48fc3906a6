"""`megatron_fsdp.uneven_dtensor` on tensors of this library and on stock DTensors, by values, on gloo."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from megatron_fsdp import uneven_dtensor
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from tests.support.on_ranks import assert_equal_tensors, local_of, on_ranks
from tests.support.uneven import CASES, make_mesh


def stock(mesh: DeviceMesh, whole: Tensor, lengths: list[list[int]], placements: list[Placement]) -> DTensor:
    """A stock DTensor by from_local: mesh dim after mesh dim cut into lengths of its own."""
    local = whole
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            sizes = [round(n * local.shape[placement.dim] / sum(lengths[dim])) for n in lengths[dim][:-1]]
            sizes.append(local.shape[placement.dim] - sum(sizes))
            local = local.split(sizes, placement.dim)[coordinate[dim]]
    stride = torch.empty(whole.shape).stride()
    return DTensor.from_local(local.clone().contiguous(), mesh, placements, shape=whole.shape, stride=stride)


def stock_cases() -> list[tuple[DTensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(10, 6, generator=generator)
    flat, square = make_mesh((4,)), make_mesh((2, 2))
    return [
        (stock(flat, whole, [[1, 5, 0, 4]], [Shard(0)]), whole),
        (stock(flat, whole, [[3, 0, 0, 3]], [Shard(1)]), whole),
        (stock(square, whole, [[3, 7], [1, 5]], [Shard(0), Shard(1)]), whole),
        (stock(square, whole, [[3, 2], [1, 2]], [Shard(0), Shard(0)]), whole),
        (stock(square, whole, [[], [2, 8]], [Replicate(), Shard(0)]), whole),
        (DTensor.from_local(whole.clone(), flat, [Replicate()]), whole),
    ]


def own_cases() -> list[tuple[DTensor, Tensor]]:
    return [(case.tensor(make_mesh(case.sizes)), case.whole()) for case in CASES if case.num_ranks == 4]


@on_ranks(4)
def test_any_uneven_dtensor_is_gathered_whole() -> None:
    for tensor, whole in [*stock_cases(), *own_cases()]:
        uneven_dtensor.validate_uneven_dtensor(tensor)
        assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(tensor), whole)
        replicated = uneven_dtensor.redistribute_uneven_dtensor_to_replicated(tensor)
        assert type(replicated) is DTensor
        assert replicated.placements == (Replicate(),) * tensor.device_mesh.ndim
        assert torch.equal(replicated.to_local(), whole)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            old = uneven_dtensor.gather_uneven_dtensor_to_full_tensor(tensor)
        assert [each.category for each in caught] == ([DeprecationWarning] if dist.get_rank() == 0 else [])
        assert torch.equal(old.to_local(), whole)


@on_ranks(4)
def test_chunks_are_where_the_values_are() -> None:
    for tensor, whole in [*stock_cases(), *own_cases()]:
        local = local_of(tensor)
        uneven_dtensor.update_uneven_dtensor_chunk_metadata(tensor)
        chunks = local.__create_chunk_list__()  # type: ignore[attr-defined]
        items = local.__create_write_items__("w", tensor)  # type: ignore[attr-defined]
        spec = getattr(tensor, "shard_spec", None)
        saved = chunks if spec is None or spec.description.is_saved_here else []
        assert [item.tensor_data.chunk for item in items] == saved
        assert (local.numel() == 0) == (chunks == [])
        parts = [whole[tuple(slice(o, o + n) for o, n in zip(c.offsets, c.sizes, strict=True))] for c in chunks]
        assert not parts or torch.equal(torch.cat([part.reshape(-1) for part in parts]), local.reshape(-1))
        if len(chunks) > 1:
            with pytest.raises(ValueError, match="chunks, not one"):
                uneven_dtensor.gather_and_compute_chunk_metadata(tensor)
            continue
        chunk = uneven_dtensor.gather_and_compute_chunk_metadata(tensor)
        assert chunks in ([], [chunk])
        assert math.prod(chunk.sizes) == local.numel()


@on_ranks(4)
def test_pieces_of_a_split_are_views_of_what_torch_would_split() -> None:
    full = uneven_dtensor.uneven_dtensor_to_full_tensor
    for index, (tensor, whole) in enumerate([*stock_cases(), *own_cases()]):
        inside_rows = isinstance(tensor, UnevenDTensor) and tensor.shard_spec.description.is_cut_inside_rows
        for dim in range(tensor.ndim):
            sizes = [1, 0, whole.shape[dim] - 1] if (index + dim) % 2 else 2
            if inside_rows and dim:
                with pytest.raises(ValueError, match="along dim 0 only"):
                    list(uneven_dtensor.split_dtensor(tensor, sizes, dim))
                continue
            pieces = list(uneven_dtensor.split_dtensor(tensor, sizes, dim - tensor.ndim, True))
            for piece, want in zip(pieces, whole.split(sizes, dim), strict=True):
                assert piece.shape == want.shape
                assert torch.equal(full(piece), want)
                assert hasattr(local_of(piece), "__create_chunk_list__")
                piece.to_local().add_(0)
        first = next(uneven_dtensor.split_dtensor(tensor, 2))
        first.to_local().fill_(7.0)
        assert torch.equal(full(tensor), whole.index_fill(0, torch.arange(min(2, len(whole))), 7.0))


@on_ranks(4)
def test_state_dicts_of_uneven_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    targets = [*stock_cases(), *own_cases()]
    state = {str(index): tensor for index, (tensor, _) in enumerate(targets)}
    wholes = {str(index): whole for index, (_, whole) in enumerate(targets)}
    nested: dict[str, Any] = {"model": state}
    assert uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(nested) is nested
    dcp.save(nested, checkpoint_id=tmp_path)
    empty = {name: torch.zeros_like(whole) for name, whole in wholes.items()}
    dcp.load({"model": empty}, checkpoint_id=tmp_path)
    assert_equal_tensors(empty, wholes)
    state = {str(index): tensor for index, (tensor, _) in enumerate([*stock_cases(), *own_cases()])}
    for tensor in state.values():
        tensor.to_local().zero_()
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
    dcp.load({"model": state}, checkpoint_id=tmp_path)
    full = uneven_dtensor.uneven_dtensor_to_full_tensor
    assert_equal_tensors({name: full(tensor) for name, tensor in state.items()}, wholes)


@on_ranks(2)
def test_wrong_uses_are_refused_in_words() -> None:
    mesh = make_mesh((2,))
    tensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], shape=torch.Size((5, 3)), stride=(3, 1))
    messages = []
    for use in (
        lambda: uneven_dtensor.validate_uneven_dtensor(tensor),
        lambda: uneven_dtensor.uneven_dtensor_to_full_tensor(torch.ones(2)),  # type: ignore[arg-type]
        lambda: uneven_dtensor.uneven_dtensor_to_full_tensor(DTensor.from_local(torch.ones(2), mesh, [Partial()])),
        lambda: list(uneven_dtensor.split_dtensor(tensor, [6, -1])),
        lambda: list(uneven_dtensor.split_dtensor(tensor, 1, 2)),
        lambda: uneven_dtensor.gather_and_compute_chunk_metadata(
            DTensor.from_local(
                torch.ones(dist.get_rank() + 1), mesh, [Shard(0)], shape=torch.Size((3, 1)), stride=(1, 1)
            )
        ),
    ):
        with pytest.raises((AssertionError, TypeError, ValueError)) as raised:
            use()
        messages.append(f"{raised.type.__name__}: {raised.value}")
    found = messages
    starts = [
        "AssertionError: no rank holds a border",
        "TypeError: a Tensor was given",
        "ValueError: a DTensor placed as (Partial(sum),)",
        "ConfigurationError: a dimension of 5 cannot be split into (6, -1)",
        "ValueError: a tensor of shape (5, 3) has no dimension 2",
        "ValueError: the local tensor of shape",
    ]
    for message, start in zip(found, starts, strict=True):
        assert message.startswith(start), message


def test_nested_dicts_are_walked() -> None:
    state = {"a": {"b": 1, "c": {"d": "x"}}, "e": 2}
    chains = uneven_dtensor.filter_unflattened_state_dict(state, visit_condition=lambda value: isinstance(value, int))
    assert chains == [["a", "b"], ["e"]]
    assert uneven_dtensor.get_unflattened_state_dict(state, ["a", "c", "d"]) == "x"
    assert uneven_dtensor.filter_unflattened_state_dict(state, ["k"], lambda value: value == "x") == [
        ["k", "a", "c", "d"]
    ]
    with pytest.raises(KeyError, match="'z' of the chain"):
        uneven_dtensor.get_unflattened_state_dict(state, ["a", "z"])
