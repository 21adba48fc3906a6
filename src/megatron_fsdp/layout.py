"""Where the tensors of a group lie in one flat buffer, and how that buffer is cut into equal shards.

A layout is pure data: no devices, no ranks, no side effects. All offsets and lengths count elements, unless a name says
otherwise. `plan_layout` makes one; `megatron_fsdp.layout_planner` holds the search behind it.
"""

import enum
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.layout_planner import Item, plan_placement
from megatron_fsdp.region import Region


class GranularityKind(enum.Enum):
    """What a shard edge may not cut."""

    ROWS = "rows"
    BLOCKS = "blocks"
    TENSOR = "tensor"
    ELEMENTS = "elements"


@dataclass(frozen=True)
class Granularity:
    """How finely one tensor may be cut.

    `ROWS` is a wish: the planner lowers it to elements where whole rows would waste too much. The other kinds are
    contracts and are never changed. `Granularity.blocks(1)` is therefore the strict form of `Granularity.ROWS`.

    Attributes:
        kind: The unit that is never cut.
        rows: Number of rows that stay together; may differ from 1 for `BLOCKS` only.

    Raises:
        ConfigurationError: `rows` is below 1, or is not 1 for a kind other than `BLOCKS`.
    """

    kind: GranularityKind
    rows: int = 1

    ROWS: ClassVar["Granularity"]
    TENSOR: ClassVar["Granularity"]
    ELEMENTS: ClassVar["Granularity"]

    def __post_init__(self) -> None:
        """Refuse row counts that mean nothing."""
        if self.rows < 1:
            raise ConfigurationError(f"a granularity has rows={self.rows}; pass 1 or more.")
        if self.rows != 1 and self.kind is not GranularityKind.BLOCKS:
            raise ConfigurationError(
                f"a granularity of kind {self.kind.value!r} has rows={self.rows}; only 'blocks' takes a row count: "
                f"use Granularity.blocks({self.rows})."
            )

    @classmethod
    def blocks(cls, rows: int) -> "Granularity":
        """Blocks of `rows` consecutive rows, counted from the tensor's first row; the last block may be shorter."""
        return cls(GranularityKind.BLOCKS, rows)

    def granule_numel(self, shape: Sequence[int]) -> int:
        """Elements of a tensor of this shape that stay together: at least 1, at most the whole tensor."""
        numel = math.prod(shape)
        wanted = {
            GranularityKind.ROWS: math.prod(shape[1:]),
            GranularityKind.BLOCKS: self.rows * math.prod(shape[1:]),
            GranularityKind.TENSOR: numel,
            GranularityKind.ELEMENTS: 1,
        }[self.kind]
        return max(1, min(wanted, numel))


Granularity.ROWS = Granularity(GranularityKind.ROWS)
Granularity.TENSOR = Granularity(GranularityKind.TENSOR)
Granularity.ELEMENTS = Granularity(GranularityKind.ELEMENTS)


@dataclass(frozen=True)
class Layout:
    """Tensors in one flat buffer of `num_shards * shard_numel` elements; shard r is owned by rank r.

    Attributes:
        shapes: Shape of each tensor.
        offsets: First element of each tensor in the buffer. Tensors without elements have one too.
        granules: Elements of each tensor that are never cut, counted from its first element; the last may be short.
        num_shards: Number of equal shards.
        shard_numel: Elements of one shard.

    Raises:
        ConfigurationError: The parts contradict each other: lengths differ, a tensor leaves the buffer, two overlap,
            or a shard edge falls inside a granule.
    """

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    granules: tuple[int, ...]
    num_shards: int
    shard_numel: int

    def __post_init__(self) -> None:
        """Check every invariant in time that does not depend on the number of shards."""
        if not len(self.shapes) == len(self.offsets) == len(self.granules):
            raise ConfigurationError(
                f"a layout has {len(self.shapes)} shapes, {len(self.offsets)} offsets and {len(self.granules)} "
                "granules; give one of each per tensor."
            )
        if self.num_shards < 1 or self.shard_numel < 0:
            raise ConfigurationError(
                f"a layout has num_shards={self.num_shards} and shard_numel={self.shard_numel}; pass at least 1 shard "
                "of at least 0 elements."
            )
        for index in range(len(self.shapes)):
            self._check_tensor(index)
        self._check_overlap()

    def _check_tensor(self, index: int) -> None:
        start, stop = self.tensor_range(index)
        if start < 0 or stop > self.numel:
            raise ConfigurationError(
                f"tensor {index} lies at [{start}, {stop}), outside of the buffer [0, {self.numel}): give it an offset "
                "that keeps it inside, or a larger shard_numel."
            )
        if self.granules[index] < 1:
            raise ConfigurationError(f"tensor {index} has granule {self.granules[index]}; pass 1 element or more.")
        if not self._is_cut_at_multiples_of(index, self.granules[index]):
            raise ConfigurationError(
                f"tensor {index} at [{start}, {stop}) is cut inside a granule of {self.granules[index]} elements by "
                f"shards of {self.shard_numel} elements: move the tensor or change shard_numel."
            )

    def _check_overlap(self) -> None:
        occupied = sorted((*self.tensor_range(i), i) for i in range(len(self.shapes)) if self.tensor_numel(i))
        for (_, stop, first), (start, _, second) in itertools.pairwise(occupied):
            if start < stop:
                raise ConfigurationError(
                    f"tensors {first} and {second} overlap: the one ends at {stop} and the other starts at {start}; "
                    "give each its own range of the buffer."
                )

    def _is_cut_at_multiples_of(self, index: int, step: int) -> bool:
        """Whether every shard edge strictly inside the tensor lies a multiple of `step` behind its start."""
        start, stop = self.tensor_range(index)
        if start == stop:
            return True
        first_edge = (start // self.shard_numel + 1) * self.shard_numel
        if first_edge >= stop:
            return True
        # A second edge inside is one shard further on, so that the shard length must be a multiple, too.
        has_second = first_edge + self.shard_numel < stop
        return (first_edge - start) % step == 0 and (not has_second or self.shard_numel % step == 0)

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.num_shards * self.shard_numel

    @property
    def payload_numel(self) -> int:
        """Elements that belong to tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no tensor."""
        return self.numel - self.payload_numel

    @property
    def padding_fraction(self) -> float:
        """Padding divided by payload; 0.0 where there is no payload."""
        payload_numel = self.payload_numel
        return self.padding_numel / payload_numel if payload_numel else 0.0

    def tensor_numel(self, index: int) -> int:
        """Elements of one tensor."""
        return math.prod(self.shapes[index])

    def tensor_range(self, index: int) -> tuple[int, int]:
        """Half-open range of one tensor in the buffer."""
        return self.offsets[index], self.offsets[index] + self.tensor_numel(index)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Half-open range of one rank's shard in the buffer.

        Raises:
            ConfigurationError: There is no such rank.
        """
        if not 0 <= rank < self.num_shards:
            raise ConfigurationError(f"rank {rank} was asked for; this layout has shards 0 to {self.num_shards - 1}.")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def local_range(self, index: int, rank: int) -> tuple[int, int]:
        """Half-open range of one tensor's flattened elements that a rank owns; start equals stop where it owns none.

        The ranges of ranks 0, 1, ... follow each other without a gap: each starts where the one before stops.
        """
        return self.range_in(index, Region(*self.shard_range(rank)))

    def range_in(self, index: int, region: Region) -> tuple[int, int]:
        """Half-open range of one tensor's flattened elements that lie in a region of the buffer, maybe empty."""
        offset, numel = self.offsets[index], self.tensor_numel(index)
        return min(max(region.start - offset, 0), numel), min(max(region.stop - offset, 0), numel)

    def pieces_in(self, region: Region) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """Where the memory of a region holds what of each tensor: half-open range and shape, as `piece_shape`.

        Worked out once for each region.
        """
        found = self._pieces.get(region)
        if found is None:
            found = self._pieces[region] = tuple(self._piece_in(index, region) for index in range(len(self.shapes)))
        return found

    @functools.cached_property
    def _pieces(self) -> dict[Region, tuple[tuple[int, int, tuple[int, ...]], ...]]:
        return {}

    def _piece_in(self, index: int, region: Region) -> tuple[int, int, tuple[int, ...]]:
        start, stop = self.range_in(index, region)
        shape = self.shapes[index] if region.numel == self.numel else self.piece_shape(index, stop - start)
        first = self.offsets[index] + start - region.start if start < stop else 0
        return first, first + stop - start, shape

    def is_row_sharded(self, index: int) -> bool:
        """Whether every rank's piece of this tensor is whole rows of dim 0 (the same answer on all ranks).

        What counts is where the shard edges fall, not the granularity that was asked for: a tensor cut by elements that
        happens to be cut between rows only is row sharded. Tensors without dimensions or with empty rows never are.
        """
        shape = self.shapes[index]
        row_numel = math.prod(shape[1:])
        return len(shape) > 0 and row_numel > 0 and self._is_cut_at_multiples_of(index, row_numel)

    def local_shape(self, index: int, rank: int) -> tuple[int, ...]:
        """Shape of a rank's piece: `(rows, *shape[1:])` for a row-sharded tensor, `(elements,)` otherwise."""
        start, stop = self.local_range(index, rank)
        return self.piece_shape(index, stop - start)

    def piece_shape(self, index: int, numel: int) -> tuple[int, ...]:
        """Shape of a piece of `numel` elements that is made of whole shards' parts; as `local_shape`."""
        if not self.is_row_sharded(index):
            return (numel,)
        row_shape = self.shapes[index][1:]
        return (numel // math.prod(row_shape), *row_shape)


def plan_layout(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    *,
    alignment_numel: int = 1,
    granularity: Sequence[Granularity] | Granularity = Granularity.ROWS,
    max_waste: float = 0.01,
    numel_multiple: int = 1,
) -> Layout:
    """Lay tensors into one flat buffer of `num_shards` equal shards, with as little padding as the search finds.

    Every tensor and every shard starts at a multiple of `alignment_numel`. Where whole rows cost more than `max_waste`,
    as few `ROWS` tensors as reasonable are cut at any aligned element instead; the other granularities are contracts.
    The same arguments give the same layout on every rank and in every run.

    With T non-empty tensors, all of them `ROWS` or `ELEMENTS`, the padding is guaranteed not to exceed

        max(max_waste * payload_numel, T * (alignment_numel - 1) + (num_shards - 1) * alignment_numel)

    elements. With a `numel_multiple` the second term is T * (alignment_numel - 1) + common - alignment_numel, where
    common = lcm(num_shards * alignment_numel, numel_multiple): what equal shards of aligned length add up to. So
    alignment aside it costs less than one multiple where num_shards * alignment_numel divides it. `BLOCKS` and
    `TENSOR` may force more: then rows are kept as far as that costs nothing beyond the smallest buffer that the search
    finds without them.

    Args:
        shapes: Shape of each tensor; `()` is a scalar, and a tensor may have no elements.
        num_shards: Number of equal shards, at least 1.
        alignment_numel: Alignment in elements, e.g. 16 bytes divided by the item size.
        granularity: One for all tensors, or one per tensor.
        max_waste: Padding divided by payload that keeping rows whole may cost.
        numel_multiple: The whole buffer is a multiple of this many elements, e.g. 2**16 for fast rings of NCCL. Where
            it leaves no cheap length for whole rows, more tensors are cut inside rows than without it.

    Raises:
        ConfigurationError: An argument is out of range, or the number of granularities is not the number of shapes.
    """
    checked = tuple(_checked_shape(index, shape) for index, shape in enumerate(shapes))
    wanted = _granularity_per_tensor(granularity, len(checked))
    if num_shards < 1:
        raise ConfigurationError(f"num_shards is {num_shards}; pass the number of ranks, 1 or more.")
    if alignment_numel < 1:
        raise ConfigurationError(f"alignment_numel is {alignment_numel}; pass 1 (no alignment) or more.")
    if numel_multiple < 1:
        raise ConfigurationError(f"numel_multiple is {numel_multiple}; pass 1 (any length) or more.")
    if not 0.0 <= max_waste < math.inf:
        raise ConfigurationError(
            f"max_waste is {max_waste}; pass a finite fraction of 0 or more, 0.01 for one percent."
        )
    items = [
        Item(math.prod(shape), kind.granule_numel(shape), kind.kind is GranularityKind.ROWS)
        for shape, kind in zip(checked, wanted, strict=True)
    ]
    placement = plan_placement(items, num_shards, alignment_numel, max_waste, numel_multiple)
    return Layout(checked, placement.offsets, placement.granules, num_shards, placement.shard_numel)


def _checked_shape(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    if any(length < 0 for length in shape):
        raise ConfigurationError(f"shape {index} is {tuple(shape)}; no dimension may be negative.")
    return tuple(int(length) for length in shape)


def _granularity_per_tensor(granularity: Sequence[Granularity] | Granularity, count: int) -> tuple[Granularity, ...]:
    if isinstance(granularity, Granularity):
        return (granularity,) * count
    if len(granularity) != count:
        raise ConfigurationError(
            f"{len(granularity)} granularities were given for {count} shapes; give one per shape, or one for all."
        )
    return tuple(granularity)
