"""How a `torch_dist` file lays out live parameters: global keys, stacked layers and experts, grids of chunks."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from megatron_fsdp.sharding.shards import Box, boxes_of_range
from tests.support.torch_dist.gpt import GptSpec

_ROW_CUT = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_q_up_proj|linear_kv_up_proj)\.(weight|bias)$")
_COLUMN_CUT = re.compile(r"(linear_proj|linear_fc2)\.weight$")


@dataclass(frozen=True)
class Stored:
    """One tensor as a file holds it.

    Attributes:
        tensor: Of the shape in the file.
        boxes: Its chunks.
        original_shape: The true shape where the file holds flattened cells; None where it holds plain shapes.
    """

    tensor: Tensor
    boxes: tuple[Box, ...]
    original_shape: tuple[int, ...] | None = None


def file_key(name: str, spec: GptSpec, singleton: bool = False) -> tuple[str, tuple[int, ...]]:
    """The key of a live parameter and its indices on the leading axes.

    Args:
        name: Live name.
        spec: Of the model.
        singleton: Layers and experts keep their index in the key (Megatron's `singleton_local_shards`).
    """
    indices: list[int] = []
    stacks_layers = spec.homogeneous and not singleton
    layer = re.match(r"(decoder\.layers)\.(\d+)\.(.*)", name)
    if layer and stacks_layers:
        name = f"{layer[1]}.{layer[3]}"
        indices.append(int(layer[2]))
    expert = re.match(r"(.*\.experts)\.(linear_fc[12])\.weight(\d+)$", name)
    if expert and singleton:
        name = f"{expert[1]}.{expert[3]}.{expert[2]}.weight"
    elif expert:
        name = f"{expert[1]}.experts.{expert[2]}.weight"
        indices.append(int(expert[3]))
    return name, tuple(indices)


def stack(tensors: Mapping[str, Tensor], spec: GptSpec, singleton: bool = False) -> dict[str, tuple[Tensor, int]]:
    """Live tensors as a file groups them: key -> (tensor, how many of its axes are layers and experts)."""
    members: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for name, tensor in tensors.items():
        if singleton and spec.swiglu and re.search(r"\.experts\.linear_fc1\.weight\d+$", name):
            key, indices = file_key(name, spec, singleton)
            half = len(tensor) // 2
            members[f"{key}_w"], members[f"{key}_v"] = {indices: tensor[:half]}, {indices: tensor[half:]}
            continue
        key, indices = file_key(name, spec, singleton)
        members.setdefault(key, {})[indices] = tensor
    return {key: _join(parts) for key, parts in members.items()}


def _join(parts: dict[tuple[int, ...], Tensor]) -> tuple[Tensor, int]:
    lead = tuple(max(index[axis] for index in parts) + 1 for axis in range(len(next(iter(parts)))))
    assert len(parts) == math.prod(lead)
    ordered = [parts[index].clone() for index in sorted(parts)]
    return torch.stack(ordered).reshape(*lead, *ordered[0].shape) if lead else ordered[0], len(lead)


def grid_of(key: str, tensor: Tensor, leading: int, tp: int, gated: Callable[[str], bool]) -> tuple[int, ...]:
    """Into how many parts each axis is cut."""
    grid = [*tensor.shape[:leading], *(1 for _ in tensor.shape[leading:])]
    if re.search(r"linear_fc1\.(weight|bias)$", key):
        grid[leading] = 2 * tp if gated(key) else tp
    elif _ROW_CUT.search(key):
        grid[leading] = tp
    elif _COLUMN_CUT.search(key):
        grid[leading + 1] = tp
    return tuple(grid)


def boxes_of_grid(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[Box, ...]:
    """The cells of a grid."""
    lengths = tuple(size // parts for size, parts in zip(shape, grid, strict=True))
    return tuple(
        Box(tuple(i * n for i, n in zip(cell, lengths, strict=True)), lengths)
        for cell in product(*(range(parts) for parts in grid))
    )


def plain(tensor: Tensor, grid: tuple[int, ...]) -> Stored:
    """Stored in its own shape."""
    return Stored(tensor, boxes_of_grid(tuple(tensor.shape), grid))


def flattened_cells(tensor: Tensor, grid: tuple[int, ...], dp: int) -> Stored:
    """Stored as the cells of a grid, each flat and cut over data-parallel ranks at places that fit nothing."""
    shape = tuple(tensor.shape)
    cells = [_part(tensor, box).reshape(-1) for box in boxes_of_grid(shape, grid)]
    stored = torch.stack(cells).reshape(*grid, -1)
    flat = stored.shape[-1]
    cuts = sorted({0, flat, *(min(flat, flat * rank // dp + 1) for rank in range(1, dp))})
    boxes = [
        Box((*cell, start), (*(1 for _ in cell), stop - start))
        for cell in product(*(range(parts) for parts in grid))
        for start, stop in pairwise(cuts)
    ]
    return Stored(stored, tuple(boxes), shape)


def irregular(tensor: Tensor, lengths: tuple[int, ...]) -> Stored:
    """A one-dimensional tensor in chunks of these lengths."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return Stored(tensor, tuple(Box((start,), (n,)) for start, n in zip(starts, lengths, strict=True)))


def _part(tensor: Tensor, box: Box) -> Tensor:
    for axis, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor


def parts(stored: Stored) -> Iterator[tuple[Box, Tensor]]:
    """Each chunk with its elements."""
    for box in stored.boxes:
        yield box, _part(stored.tensor, box)


def whole(tensor: Tensor) -> Stored:
    """In one chunk."""
    return Stored(tensor, boxes_of_range(tuple(tensor.shape), 0, tensor.numel()))
