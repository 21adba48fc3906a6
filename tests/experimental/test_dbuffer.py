"""`DBuffer`: layout, tensors of a buffer, moves between placements on 2, 4 and 5 ranks, and what is refused."""

import itertools
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from megatron_fsdp.experimental import DBuffer, Placements
from megatron_fsdp.experimental.dbuffer import plan_lcm_layout
from megatron_fsdp.experimental.placement import Flat, RowAtomic
from tests.support.on_ranks import of_ranks, on_ranks, refusal

SHAPES = [(5, 4), (2, 6), (3,)]
FIVE = [(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)]
R, S, SUM, AVG = Replicate(), Shard(0), Partial("sum"), Partial("avg")
ON_MESH = {"R": R, "S": S, "P": SUM, "A": AVG}


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def placed(letters: str) -> list[Placement]:
    return [ON_MESH[letter] for letter in letters]


def whole() -> list[torch.Tensor]:
    """Tensors of `SHAPES` with small integers, all different."""
    parts = torch.arange(35.0).split([math.prod(shape) for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def summands(mesh: DeviceMesh, letters: str, rank: int | None = None) -> DBuffer:
    """A buffer of the tensors, where it is partial of (rank + 1) times the tensors; None: the rank of all."""
    rank = dist.get_rank() if rank is None else rank
    factor = rank + 1 if set(letters) & {"P", "A"} else 1
    return DBuffer.distribute_tensors([factor * each for each in whole()], mesh, placed(letters))


def lists(buffer: DBuffer) -> list[Any]:
    return [buffer.get_local_tensor(index).tolist() for index in range(len(buffer.layout.tensor_shapes))]


def expected(buffer: DBuffer, factor: float = 1.0) -> list[Any]:
    """This rank's rows of `factor` times the tensors."""
    found, stop = [], buffer.offset + buffer.local_buffer.numel()
    for tensor, offset in zip(whole(), buffer.layout.tensor_to_offset, strict=True):
        row = math.prod(tensor.shape[1:])
        first, last = (min(max((edge - offset) // row, 0), len(tensor)) for edge in (buffer.offset, stop))
        found.append((factor * tensor[first:last]).tolist())
    return found


# ---- layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "num_ranks", "offsets", "size"),
    [
        (SHAPES, 2, (0, 24, 20), 48),
        ([(4, 4), (1, 6)], 2, (0, 18), 24),
        (FIVE, 5, (0, 12, 32, 28, 48), 60),
        ([(3, 5), (2, 3), ()], 4, (0, 15, 21), 60),
        ([], 2, (), 0),
    ],
)
def test_layout_aligns_to_the_least_common_multiple_and_fills_gaps(
    shapes: list[tuple[int, ...]], num_ranks: int, offsets: tuple[int, ...], size: int
) -> None:
    layout = plan_lcm_layout(shapes, num_ranks)
    assert (layout.tensor_shapes, layout.tensor_to_offset, layout.size) == (tuple(shapes), offsets, size)


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), max_size=9),
    num_ranks=st.sampled_from([1, 2, 5]),
)
def test_layout_never_overlaps_nor_cuts_rows(shapes: list[list[int]], num_ranks: int) -> None:
    layout = plan_lcm_layout(shapes, num_ranks)
    ranges = sorted(layout.tensor_range(index) for index, shape in enumerate(shapes) if math.prod(shape))
    assert all(stop <= start for (_, stop), (start, _) in pairwise([*ranges, (layout.size, layout.size)]))
    assert all(layout.is_row_sharded(index) for index, shape in enumerate(shapes) if math.prod(shape))


# ---- one buffer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_constructor_allocates_this_ranks_part(num_ranks: int) -> None:
    shapes = [(3, 5), (7, 3)]
    full = DBuffer(line(), [R], shapes, torch.bfloat16, "cpu")
    shard = DBuffer(line(), iter([S]), shapes, torch.float64, torch.device("cpu"))
    assert (full.offset, full.local_buffer.shape) == (0, (full.layout.size,))
    assert (full.dtype, full.device, full.placements) == (torch.bfloat16, torch.device("cpu"), (R,))
    assert full.layout.size % (15 * num_ranks) == 0
    assert shard.offset == dist.get_rank() * shard.layout.size // num_ranks
    assert shard.local_buffer.numel() == shard.layout.size // num_ranks
    assert (shard.dtype, shard.placements, shard.allocation_stream) == (torch.float64, (Flat(),), None)


@on_ranks(2)
def test_cast_keeps_the_layout() -> None:
    buffer = summands(line(), "S")
    assert buffer.cast(torch.float32) is buffer
    cast = buffer.cast(torch.bfloat16)
    assert (cast.layout, cast.offset, cast.dtype) == (buffer.layout, buffer.offset, torch.bfloat16)
    assert lists(cast) == expected(buffer)
    out = DBuffer(buffer.mesh, [S], SHAPES, torch.float64, "cpu")
    pointer = out.local_buffer.data_ptr()
    assert buffer.cast(torch.float64, out=out) is out
    assert (lists(out), out.local_buffer.data_ptr()) == (expected(buffer), pointer)


@on_ranks(2)
def test_released_memory_comes_back_under_the_same_views() -> None:
    buffer = summands(line(), "S")
    storage, view = buffer.local_buffer.untyped_storage(), buffer.get_local_tensor(0)
    num_bytes = storage.nbytes()
    buffer.release_storage()
    assert storage.nbytes() == 0
    buffer.reallocate_storage()
    assert (storage.nbytes(), num_bytes) == (24 * 4, 24 * 4)
    buffer.local_buffer.fill_(7.0)
    assert view.unique().tolist() == ([7.0] if len(view) else [])
    buffer.reallocate_storage()  # nothing is released, nothing is lost
    assert buffer.local_buffer.unique().tolist() == [7.0]


@on_ranks(2)
def test_from_local_takes_the_memory_as_it_is() -> None:
    local = torch.full((24,), dist.get_rank() + 1.0)
    buffer = DBuffer.from_local(local, line(), iter([S]), iter(SHAPES), allocation_stream=None)
    assert (buffer.local_buffer.data_ptr(), buffer.offset) == (local.data_ptr(), 24 * dist.get_rank())
    full = buffer.allgather(0)
    assert full.local_buffer.tolist() == [1.0] * 24 + [2.0] * 24
    assert (full.placements, full.offset) == ((R,), 0)


@pytest.mark.parametrize("letters", ["R", "S", "P"])
@on_ranks(2)
def test_tensors_of_a_buffer(letters: str) -> None:
    buffer = summands(line(), letters)
    for index, tensor in enumerate(whole()):
        local, dtensor = buffer.get_local_tensor(index), buffer.get_dtensor(index)
        assert local.is_contiguous()
        assert local.untyped_storage().data_ptr() == buffer.local_buffer.untyped_storage().data_ptr()
        assert (dtensor.placements, dtensor.shape) == (buffer.placements, tensor.shape)
        assert dtensor.to_local().data_ptr() == local.data_ptr()
        assert torch.equal(dtensor.full_tensor(), 3 * tensor if letters == "P" else tensor)
    assert lists(buffer) == expected(buffer, dist.get_rank() + 1 if letters == "P" else 1)


@on_ranks(2)
def test_distribution_detaches_and_makes_contiguous() -> None:
    leaf = torch.nn.Parameter(torch.arange(12.0))
    given = [leaf.view(3, 4).t() * 1.0, torch.empty(2, 3, device="meta"), torch.arange(2.0)]
    buffer = DBuffer.distribute_tensors(iter(given), line(), [S])
    assert (buffer.device.type, buffer.local_buffer.requires_grad) == ("cpu", False)
    full = buffer.allgather(0)
    assert torch.equal(full.get_local_tensor(0), torch.arange(12.0).view(3, 4).t())
    assert full.get_local_tensor(1).shape == (2, 3)
    assert full.get_local_tensor(2).tolist() == [0.0, 1.0]


# ---- moves along one axis -------------------------------------------------------------------------------------------


def into(buffer: DBuffer, letters: str, with_out: bool) -> dict[str, DBuffer]:
    """The argument `out`, filled with NaN, where a test wants one."""
    if not with_out:
        return {}
    out = DBuffer(buffer.mesh, placed(letters), SHAPES, buffer.dtype, "cpu")
    out.local_buffer.fill_(math.nan)
    return {"out": out}


MOVES: dict[str, tuple[float, Callable[..., DBuffer]]] = {
    "SR": (1, lambda found, out: found.allgather(0, **out)),
    "PR": (3, lambda found, out: found.allreduce(-1, **out)),
    "AR": (1.5, lambda found, out: found.allreduce(0, **out)),
    "PS": (3, lambda found, out: found.reduce_scatter(0, S, **out)),
    "AS": (1.5, lambda found, out: found.reduce_scatter(0, Flat(), **out)),
    "RS": (1, lambda found, out: found.scatter(0, S, **out)),
}


@pytest.mark.parametrize("name", MOVES)
@on_ranks(2)
def test_each_move_and_redistribute_give_the_same(name: str) -> None:
    (source, target), (factor, move) = name, MOVES[name]
    buffer = summands(line(), source)
    before = buffer.local_buffer.clone()
    both: tuple[Callable[..., DBuffer], ...] = (move, lambda found, out: found.redistribute(placed(target), **out))
    for run, with_out in itertools.product(both, (False, True)):
        out = into(buffer, target, with_out)
        pointers = [each.local_buffer.data_ptr() for each in out.values()]
        result = run(buffer, out)
        assert result.placements == tuple(placed(target))
        assert lists(result) == expected(result, factor)
        assert result is out.get("out", result)
        assert [each.local_buffer.data_ptr() for each in out.values()] == pointers
    assert torch.equal(buffer.local_buffer, before)


@on_ranks(2)
def test_scattering_and_relabelling_share_memory() -> None:
    buffer = summands(line(), "R")
    shard, average = buffer.scatter(0, S), buffer.redistribute([AVG])
    buffer.local_buffer.add_(1.0)
    assert shard.local_buffer.tolist() == buffer.local_buffer[shard.offset :][:24].tolist()
    assert average.local_buffer.data_ptr() == buffer.local_buffer.data_ptr()
    assert torch.equal(shard.allgather(0).local_buffer, buffer.local_buffer)
    assert torch.equal(average.allreduce(0).local_buffer, buffer.local_buffer)
    assert buffer.redistribute([R]) is buffer
    copied = buffer.redistribute([R], **into(buffer, "R", True))
    assert torch.equal(copied.local_buffer, buffer.local_buffer)
    assert copied.local_buffer.data_ptr() != buffer.local_buffer.data_ptr()


@on_ranks(4)
def test_reduce_scatter_adds_in_float32() -> None:
    one = 256.0 if dist.get_rank() == 0 else 1.0  # 256 + 1 is 256 in bfloat16
    buffer = DBuffer.distribute_tensors([torch.full((4, 2), one, dtype=torch.bfloat16)], line(), [SUM])
    assert buffer.reduce_scatter(0, S).local_buffer.tolist() == [260.0, 260.0]


@on_ranks(2)
def test_symmetric_memory_is_not_needed_and_refused_off_cuda() -> None:
    buffer = summands(line(), "A")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(_symmetric_memory, "is_symm_mem_tensor", raising=False)
        assert not buffer.is_symmetric_memory
        assert lists(buffer.reduce_scatter(0, S)) == expected(buffer.reduce_scatter(0, S), 1.5)
    assert "a buffer on cpu in no symmetric memory" in refusal(buffer.rendezvous, 0, error=ValueError)


# ---- several axes ---------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_the_inner_axis_cuts_first() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    buffer = summands(mesh, "SS")
    size = buffer.layout.size
    assert of_ranks(buffer.offset) == [0, size // 2, size // 4, size // 4 * 3]  # (outer, inner) 00 01 10 11
    half = buffer.allgather("outer")
    assert (half.placements, of_ranks(half.offset)) == ((R, Flat()), [0, size // 2, 0, size // 2])
    assert lists(half.allgather("inner")) == expected(half.allgather(1))
    assert lists(half.scatter(-2, S)) == expected(buffer)


MESHES = {"2 x 2": [[0, 1], [2, 3]], "2 x 1 x 2": [[[0, 1]], [[2, 3]]]}
# The sum of all ranks' summands is 10 times the tensors, that of two along one axis 3 times.
LONGER = {"RSRR": 1, "SSRR": 1, "RRSS": 1, "RSSS": 1, "PPSS": 10, "AASS": 2.5, "PPRS": 10, "AARR": 2.5}
LONGER |= {"PRSS": 3, "PSSS": 3, "PSRR": 3, "RPSS": 3, "ARRS": 1.5, "RRAS": 1}


@pytest.mark.parametrize("name", MESHES)
@on_ranks(4)
def test_buffers_move_over_several_axes(name: str) -> None:
    for number, move in enumerate(LONGER):
        check_move(DeviceMesh("cpu", MESHES[name]), move, with_out=number % 2 == 1)


def check_move(mesh: DeviceMesh, move: str, *, with_out: bool) -> None:
    factor = LONGER[move]
    source, target = move[:2], move[2:]
    if mesh.ndim == 3:  # an axis of one rank between the two
        source, target = source[0] + 2 * source[1], target[0] + 2 * target[1]
    partial_dims = [dim for dim, letter in enumerate(source) if letter in "PA"]
    ranks = dist.group.WORLD if source[0] == source[-1] else mesh.get_group((partial_dims or [0])[-1])
    buffer = summands(mesh, source, dist.get_rank(ranks))
    before = buffer.local_buffer.clone()
    out = into(buffer, target, with_out and "A" not in target)
    result = buffer.redistribute(placed(target), **out)
    assert result.placements == tuple(placed(target))
    assert lists(result) == expected(result, factor)
    assert result is out.get("out", result)
    assert torch.equal(buffer.local_buffer, before)
    for index, tensor in enumerate(whole() if "A" not in target else ()):
        assert torch.equal(result.get_dtensor(index).full_tensor(), factor * tensor)


@on_ranks(4)
def test_the_outer_axis_carries_shards_of_the_inner_one() -> None:
    buffer = summands(init_device_mesh("cpu", (2, 2)), "PP")
    buffer.redistribute([R, S])
    outer, inner = (axis.traffic for axis in buffer._axes)
    num_bytes = buffer.local_buffer.nbytes
    # two ranks: a reduce-scatter sends half of the buffer, an all-reduce all of its half
    assert (outer.reductions, outer.reduce_bytes) == (1, num_bytes // 2)
    assert (inner.reductions, inner.reduce_bytes) == (1, num_bytes // 2)
    assert (outer.gathers, inner.gathers) == (0, 0)


# ---- refusals -------------------------------------------------------------------------------------------------------


def empty(mesh: DeviceMesh, *placements: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> DBuffer:
    return DBuffer(mesh, placements, SHAPES, dtype, device)


REFUSALS: dict[str, tuple[type[Exception], Callable[[DeviceMesh], object]]] = {
    "this rank holds 24 elements": (ValueError, lambda m: DBuffer.from_local(torch.ones(9), m, [S], SHAPES)),
    "shape (4, 6)": (ValueError, lambda m: DBuffer.from_local(torch.ones(4, 6), m, [S], SHAPES)),
    "strides (2,)": (ValueError, lambda m: DBuffer.from_local(torch.ones(48)[::2], m, [S], SHAPES)),
    "has 1 axes": (ValueError, lambda m: empty(m, R, S)),
    "'S' is no placement": (TypeError, lambda m: empty(m, "S")),
    "cuts dim 1": (NotImplementedError, lambda m: empty(m, Shard(1))),
    "Partial(max)": (NotImplementedError, lambda m: empty(m, Partial("max"))),
    "no tensors": (ValueError, lambda m: DBuffer.distribute_tensors([], m, [S])),
    "torch.float32 and torch.float64": (
        ValueError,
        lambda m: DBuffer.distribute_tensors([torch.ones(2), torch.ones(2).double()], m, [S]),
    ),
    "begins from Flat": (ValueError, lambda m: empty(m, R).allgather(0)),
    "begins from Partial": (ValueError, lambda m: empty(m, S).allreduce(0)),
    "reduce_scatter along axis 0": (ValueError, lambda m: empty(m, R).reduce_scatter(0, S)),
    "begins from Replicate": (ValueError, lambda m: empty(m, S).scatter(0, S)),
    "to Shard(0) only": (NotImplementedError, lambda m: empty(m, R).scatter(0, R)),
    "the target Shard(dim=1)": (NotImplementedError, lambda m: empty(m, SUM).reduce_scatter(0, Shard(1))),
    "1 is no axis": (ValueError, lambda m: empty(m, S).allgather(1)),
    "to Partial(avg)": (NotImplementedError, lambda m: empty(m, S).redistribute([AVG])),
    "from Replicate() to Partial(sum)": (NotImplementedError, lambda m: empty(m, R).redistribute([SUM])),
    "from Partial(avg) to Partial(sum)": (NotImplementedError, lambda m: empty(m, AVG).redistribute([SUM])),
    "into out": (NotImplementedError, lambda m: empty(m, R).redistribute([AVG], out=empty(m, AVG))),
    "out has placements": (ValueError, lambda m: empty(m, S).allgather(0, out=empty(m, S))),
    "out has dtype": (ValueError, lambda m: empty(m, R).scatter(0, S, out=empty(m, S, dtype=torch.float64))),
    "out has device meta": (ValueError, lambda m: empty(m, S).redistribute([R], out=empty(m, R, device="meta"))),
    "out has layout": (
        ValueError,
        lambda m: empty(m, SUM).redistribute([S], out=DBuffer(m, [S], [(2, 6)], torch.float32, "cpu")),
    ),
    "out has mesh": (ValueError, lambda m: empty(m, S).redistribute([S], out=empty(DeviceMesh("cpu", [[0, 1]]), S, S))),
}


@on_ranks(2)
def test_bad_input_is_refused_in_one_sentence() -> None:
    for words, (error, call) in REFUSALS.items():
        text = refusal(call, line(), error=error)
        assert words in text
        assert ". " not in text


@on_ranks(4)
def test_shards_are_of_the_inner_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    words = "must be a suffix"
    assert words in refusal(DBuffer, mesh, [S, R], SHAPES, torch.float32, "cpu", error=ValueError)
    assert words in refusal(summands(mesh, "SS").allgather, 1, error=ValueError)
    assert words in refusal(summands(mesh, "RR").redistribute, [S, R], error=ValueError)
    assert "uneven shards of summands" in refusal(summands(mesh, "PS").get_dtensor, 0, error=NotImplementedError)


# ---- placements of a unit -------------------------------------------------------------------------------------------


def test_flat_is_shard_0_under_another_name() -> None:
    assert RowAtomic is Flat
    assert Flat() == S
    assert hash(Flat()) == hash(S)
    assert isinstance(Flat(), Shard)
    placements = Placements(["dp"], [R], [AVG], [S])
    assert placements == Placements(("dp",), (R,), (AVG,), (Flat(),))
    assert [type(each) for each in placements.optimizer] == [Flat]


@pytest.mark.parametrize(
    ("lists_of_three", "error", "words"),
    [
        (([R, R], [AVG], [S]), ValueError, "Placements.parameter"),
        (([R], [], [S]), ValueError, "Placements.gradient"),
        (([R], [AVG], [Shard(1)]), NotImplementedError, "Placements.optimizer"),
        (([R], [AVG], [0]), TypeError, "Placements.optimizer"),
    ],
)
def test_placements_are_one_for_each_axis(
    lists_of_three: tuple[list[Any], list[Any], list[Any]], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Placements(["dp"], *lists_of_three)


@on_ranks(2)
def test_axes_of_placements_are_those_of_the_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))

    def on(*axes: int | str) -> Placements:
        return Placements(axes, *[[S] * len(axes)] * 3)

    on("outer", -1).check_axes(mesh)
    on(0, "inner").check_axes(mesh)
    assert "in the order of the mesh" in refusal(on("inner", "outer").check_axes, mesh, error=ValueError)
    assert "name each once" in refusal(on(0, "outer").check_axes, mesh, error=ValueError)
    assert "'dp' is no axis" in refusal(on("dp").check_axes, mesh, error=ValueError)
    assert "pass the submesh" in refusal(on("inner").check_axes, mesh, error=NotImplementedError)
