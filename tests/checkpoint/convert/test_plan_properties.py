"""Plans of random models: what the moves pick out of the source is the truth, each element once."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_fsdp.checkpoint.convert.convert import Cells
from megatron_fsdp.checkpoint.convert.plan import CommonState, Content, ConversionPlan, ConvertOptions, make_plan
from megatron_fsdp.checkpoint.folder import TensorEntry
from megatron_fsdp.sharding.shards import Box
from tests.support.torch_dist import (
    GptSpec,
    Truth,
    WriteOptions,
    common_state,
    expected_tensors,
    flattened_cells,
    make_truth,
    stored_tensors,
)


@st.composite
def specs(draw: st.DrawFn) -> GptSpec:
    experts = draw(st.sampled_from([0, 0, 1, 3]))
    layers = draw(st.integers(1, 3))
    return GptSpec(
        layers=layers,
        hidden=draw(st.sampled_from([2, 4])),
        ffn=draw(st.sampled_from([1, 3])),
        vocabulary=5,
        experts=experts,
        dense_layers=draw(st.integers(0, layers - 1)) if experts else 0,
        swiglu=draw(st.booleans()),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        shared_experts=draw(st.booleans()),
        expert_bias=draw(st.booleans()),
        mla=draw(st.booleans()),
        mtp=draw(st.booleans()),
        tower=draw(st.booleans()),
    )


def stored_in(singleton: bool, truth: Truth) -> dict[str, Tensor]:
    return {key: found.tensor for key, found in stored_tensors(truth, WriteOptions(singleton=singleton)).items()}


def plan_of(truth: Truth, options: ConvertOptions, *, says_swiglu: bool, singleton: bool) -> ConversionPlan:
    stored = stored_in(singleton, truth)
    tree = common_state(truth.spec, "fully_reshardable")
    if not says_swiglu:
        del tree["args"].swiglu
    entries = [TensorEntry(key, tuple(tensor.shape), tensor.dtype, ()) for key, tensor in stored.items()]
    return make_plan(Content(entries, ["common_state/shard_0_1"], CommonState.of(tree)), options)


@settings(max_examples=60)
@given(specs(), st.booleans(), st.booleans())
def test_moves_of_any_model_pick_out_the_truth(spec: GptSpec, says_swiglu: bool, singleton: bool) -> None:
    truth = make_truth(spec)
    stored = stored_in(singleton, truth)
    plan = plan_of(truth, ConvertOptions(), says_swiglu=says_swiglu, singleton=singleton)
    found = {
        move.target: stored[move.source][Box(move.offsets, move.lengths).indices].reshape(move.shape)
        for move in plan.moves
    }
    found |= {value.target: value.value for value in plan.values if isinstance(value.value, Tensor)}
    expected = expected_tensors(truth)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@settings(max_examples=40)
@given(specs(), st.booleans())
def test_moves_cover_every_element_of_what_they_read_once(spec: GptSpec, singleton: bool) -> None:
    truth = make_truth(spec)
    plan = plan_of(truth, ConvertOptions(masters="model"), says_swiglu=True, singleton=singleton)
    counts = {key: torch.zeros(t.shape) for key, t in stored_in(singleton, truth).items() if "fp32_param" not in key}
    for move in plan.moves:
        counts[move.source][Box(move.offsets, move.lengths).indices] += 1
    assert all(bool((count == 1).all()) for count in counts.values())
    assert plan.nbytes == sum(t.nbytes for k, t in stored_in(singleton, truth).items() if "fp32_param" not in k)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    ndim = draw(st.integers(1, 4))
    grid = tuple(draw(st.integers(1, 3)) for _ in range(ndim))
    block = tuple(draw(st.integers(1, 3)) for _ in range(ndim))
    shape = tuple(g * b for g, b in zip(grid, block, strict=True))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True))
    return torch.arange(math.prod(shape)).reshape(shape), grid, offsets, lengths


@given(cut_tensors())
def test_any_box_of_flattened_cells_is_read_from_the_cells_that_it_meets(
    case: tuple[Tensor, tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    tensor, grid, offsets, lengths = case
    stored = flattened_cells(tensor, grid, dp=2).tensor
    read = 0

    def read_stored(start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        nonlocal read
        read += math.prod(size)
        return stored[Box(start, size).indices].clone()

    cells = Cells.of("w", tuple(stored.shape), tuple(tensor.shape))
    found = cells.read(read_stored, offsets, lengths)
    wanted = tensor[Box(offsets, lengths).indices]
    assert torch.equal(found, wanted)
    met = (
        ((start + length - 1) // size - start // size + 1) * size
        for start, length, size in zip(offsets, lengths, cells.block, strict=True)
    )
    assert read == math.prod(met)
