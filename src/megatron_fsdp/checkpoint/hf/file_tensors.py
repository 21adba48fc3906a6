"""The tensors that a model has in Hugging Face files: their keys, and the parts of model tensors that they hold.

transformers keeps some weights in memory in another form than in files: the experts of a layer are one tensor, of
which every file tensor is a slice. Its own conversions run here on tensors of the meta device, so nothing is copied:
a slice is a view, and its strides and offset tell which part of the model tensor it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatron_fsdp.checkpoint.hf.live import with_own_classes
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

KeyMapping = Mapping[str, str] | Callable[[str], str]
"""From keys in files to names in the model: regular expressions with their replacements, applied one after another,
each to its first match (as by `re.sub(..., count=1)`), or a function."""


@dataclass(frozen=True)
class Part:
    """A box of a file tensor that is a box of a model tensor, element by element in the same order.

    `offsets` and `at` are where it begins in the model tensor and the file tensor. `dims` has for each dimension of the
    file tensor that of the model tensor, or None for one of length 1 that only the file tensor has; dimensions of the
    model tensor that are not named have length 1. `lengths` are along the dimensions of the file tensor.
    """

    name: str
    offsets: tuple[int, ...]
    dims: tuple[int | None, ...]
    at: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def file_box(self) -> Box:
        """The box in the file tensor."""
        return Box(self.at, self.lengths)

    @property
    def model_box(self) -> Box:
        """The box in the model tensor."""
        return self.to_model(self.file_box)

    def to_model(self, box: Box) -> Box:
        """Translate a box of the file tensor, inside of this part, to the model tensor."""
        offsets, lengths = list(self.offsets), [1] * len(self.offsets)
        for dim, at, offset, length in zip(self.dims, self.at, box.offsets, box.lengths, strict=True):
            if dim is not None:
                offsets[dim] += offset - at
                lengths[dim] = length
        return Box(tuple(offsets), tuple(lengths))

    def to_file(self, box: Box) -> Box:
        """Translate a box of the model tensor, inside of this part, to the file tensor."""
        offsets, lengths = list(self.at), [1] * len(self.at)
        for index, dim in enumerate(self.dims):
            if dim is not None:
                offsets[index] += box.offsets[dim] - self.offsets[dim]
                lengths[index] = box.lengths[dim]
        return Box(tuple(offsets), tuple(lengths))


class CannotFollowError(CheckpointError):
    """A conversion does more than slice and concatenate tensors."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, covered by disjoint parts of model tensors."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> FileTensor:
        """Make a file tensor that is one whole model tensor."""
        zeros, all_dims = (0,) * len(shape), tuple(range(len(shape)))
        return cls(tuple(shape), (Part(name, zeros, all_dims, zeros, tuple(shape)),))

    @property
    def names(self) -> set[str]:
        """The names of the model tensors it is made of."""
        return {part.name for part in self.parts}


class Followed(TorchFunctionMode):
    """Follows what is made of a model's tensors inside of the block: slices, and slices that are put together.

    `tensors` are those of the model, on the meta device.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.tensors = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
        self._names = {_storage(tensor): name for name, tensor in self.tensors.items()}
        self._joined: dict[int, tuple[torch.Tensor, int, list[torch.Tensor]]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, and note what it puts together."""
        name, options = getattr(func, "__name__", ""), kwargs or {}
        if name == "contiguous":  # a copy would be of unknown origin
            return args[0]
        made = func(*args, **options)
        if name in ("cat", "concat", "stack"):
            pieces, dim = list(args[0]), options.get("dim", args[1] if len(args) > 1 else 0)
            pieces = [piece.unsqueeze(dim) for piece in pieces] if name == "stack" else pieces
            self._joined[_storage(made)] = made, dim % made.ndim, pieces
        return made

    def file_tensor(self, tensor: torch.Tensor) -> FileTensor:
        """Return which parts of the model's tensors a tensor holds."""
        return FileTensor(tuple(tensor.shape), tuple(self._parts(tensor, (0,) * tensor.ndim)))

    def _parts(self, tensor: torch.Tensor, at: tuple[int, ...]) -> Iterator[Part]:
        storage = _storage(tensor)
        whole, dim, pieces = self._joined.get(storage, (None, 0, []))
        if whole is not None and _has_layout_of(tensor, whole):
            for piece in pieces:
                yield from self._parts(piece, at)
                at = (*at[:dim], at[dim] + piece.shape[dim], *at[dim + 1 :])
            return
        if storage not in self._names:
            raise CannotFollowError(
                "transformers converts weights by more than taking slices and putting them together, such as by "
                f"transposing; seen at a tensor of shape {tuple(tensor.shape)}"
            )
        name = self._names[storage]
        yield _slice_of(name, self.tensors[name], tensor, at)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _has_layout_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.shape == other.shape and tensor.stride() == other.stride() and not tensor.storage_offset()


def _slice_of(name: str, whole: torch.Tensor, view: torch.Tensor, at: tuple[int, ...]) -> Part:
    """Return which box of a contiguous tensor a view of it is."""
    shape = tuple(view.shape)
    if _has_layout_of(view, whole):
        return Part(name, (0,) * len(shape), tuple(range(len(shape))), at, shape)
    dim_of_step = {step: dim for dim, step in enumerate(whole.stride()) if whole.shape[dim] > 1}
    dims = tuple(dim_of_step.get(step) if n != 1 else None for n, step in zip(shape, view.stride(), strict=True))
    offsets, rest = [], int(view.storage_offset())
    for n, step in zip(whole.shape, whole.stride(), strict=True):
        first, rest = divmod(rest, step) if n > 1 else (0, rest)
        offsets.append(first)
    kept = [dim for dim in dims if dim is not None]
    part = Part(name, tuple(offsets), dims, at, shape)
    inside = all(a + n <= m for a, n, m in zip(offsets, part.model_box.lengths, whole.shape, strict=True))
    if rest or kept != sorted(set(kept)) or len(kept) != sum(n != 1 for n in shape) or not inside:
        raise CannotFollowError(f"transformers stores of {name} what is no slice of it, such as its transpose")
    return part


# ---- keys in files ---------------------------------------------------------------------------------------------------


def file_tensors(module: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FileTensor]:
    """Return what transformers would write, by key in the file; a model tensor may be in several (experts)."""
    if not _is_of_transformers(module):
        return {name: FileTensor.of(name, shape) for name, shape in shapes.items()}
    from transformers.core_model_loading import revert_weight_conversion

    with with_own_classes(module), Followed(shapes) as followed:
        stored = revert_weight_conversion(module, dict(followed.tensors))
    return {key: followed.file_tensor(tensor) for key, tensor in stored.items()}


def other_file_keys(module: Any, keys: Iterable[str]) -> dict[str, str]:
    """Return the names in the model to which transformers renames keys of older files, by key."""
    if not _is_of_transformers(module):
        return {}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    with with_own_classes(module):
        conversions = get_model_conversion_mapping(module)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    renamed = {key: apply_renamings(key, renamings) for key in keys}
    return {key: name for key, name in renamed.items() if name != key}


def key_variants(module: nn.Module, key: str) -> tuple[str, ...]:
    """Return the keys of a tensor: as it is, and with or without the prefix of the base model (as of `LlamaModel`)."""
    prefix = getattr(module, "base_model_prefix", "")
    if not isinstance(prefix, str) or not prefix:
        return (key,)
    dot = f"{prefix}."
    return (key, key.removeprefix(dot)) if key.startswith(dot) else (key, dot + key)


def map_keys(keys: Iterable[str], key_mapping: KeyMapping | None) -> dict[str, str]:
    """Map keys, as renamed by the user's mapping, to keys in the file."""
    if not (key_mapping is None or isinstance(key_mapping, Mapping) or callable(key_mapping)):
        raise ConfigurationError(
            f"key_mapping is a {type(key_mapping).__name__}; give a dict from regular expressions to replacements, "
            "or a function from key to name"
        )
    found: dict[str, str] = {}
    for key in keys:
        name = key_mapping(key) if callable(key_mapping) else key
        try:
            for pattern, replacement in key_mapping.items() if isinstance(key_mapping, Mapping) else ():
                name = re.sub(pattern, replacement, name, count=1)
        except (re.error, TypeError) as error:
            raise ConfigurationError(f"key_mapping {key_mapping} is no set of regular expressions: {error}") from error
        if name in found:
            raise CheckpointError(
                f"key_mapping gives {found[name]!r} and {key!r} the same name {name!r}; make it tell them apart"
            )
        found[name] = key
    return found


def is_ignored(module: nn.Module, attribute: str, names: Sequence[str]) -> bool:
    """Return whether a model declares that a tensor may be missing, or may be unexpected."""
    patterns: Any = getattr(module, attribute, None) or ()
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _is_of_transformers(module: nn.Module) -> bool:
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__
    )
