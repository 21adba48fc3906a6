"""The tensors that a model has in Hugging Face files: their keys, and the parts of model tensors that they hold.

transformers keeps some weights in memory in another form than in files: the experts of a layer are one tensor, of
which every file tensor is a slice. `FileTensor` behaves enough like a torch tensor (chunk, cat, squeeze...) to be taken
through transformers' own conversions, which then move no data, but record where each part goes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from megatron_fsdp.checkpoint.hf.live import with_own_classes
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

KeyMapping = Mapping[str, str] | Callable[[str], str]
"""From keys in files to names in the model: regular expressions with their replacements, applied one after another,
each to its first match (as by `re.sub(..., count=1)`), or a function."""


@dataclass(frozen=True)
class Part:
    """A box of a file tensor that is a box of a model tensor, element by element in the same order.

    Attributes:
        name: Of the model tensor.
        offsets: Where the box begins in the model tensor.
        dims: For each dimension of the file tensor the dimension of the model tensor, or None for one of length 1 that
            only the file tensor has. Dimensions of the model tensor that are not named here have length 1 in the box.
        at: Where the box begins in the file tensor.
        lengths: Of the box, along the dimensions of the file tensor.
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
    """A tensor in a file, composed of parts of model tensors.

    Attributes:
        shape: In the file.
        parts: They do not overlap and cover it.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> FileTensor:
        """Make a file tensor that is one whole model tensor."""
        zeros, all_dims = (0,) * len(shape), tuple(range(len(shape)))
        return cls(tuple(shape), (Part(name, zeros, all_dims, zeros, tuple(shape)),))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def names(self) -> set[str]:
        """The names of the model tensors it is made of."""
        return {part.name for part in self.parts}

    def size(self, dim: int) -> int:
        """Return the length along a dimension."""
        return self.shape[dim]

    def contiguous(self) -> FileTensor:
        """Return itself: nothing is stored yet."""
        return self

    def narrow(self, dim: int, start: int, length: int) -> FileTensor:
        """Return a slice along one dimension."""
        found = []
        for part in self.parts:
            first, last = max(part.at[dim], start), min(part.at[dim] + part.lengths[dim], start + length)
            if first < last:
                kept = part.to_model(Box(_replaced(part.at, dim, first), _replaced(part.lengths, dim, last - first)))
                found.append(
                    replace(
                        part,
                        offsets=kept.offsets,
                        at=_replaced(part.at, dim, first - start),
                        lengths=_replaced(part.lengths, dim, last - first),
                    )
                )
        return FileTensor(_replaced(self.shape, dim, length), tuple(found))

    def squeeze(self, dim: int) -> FileTensor:
        """Remove a dimension of length 1; return itself if the dimension is longer."""
        dim %= max(self.ndim, 1)
        if not self.shape or self.shape[dim] != 1:
            return self
        parts = tuple(
            replace(part, dims=_without(part.dims, dim), at=_without(part.at, dim), lengths=_without(part.lengths, dim))
            for part in self.parts
        )
        return FileTensor(_without(self.shape, dim), parts)

    def unsqueeze(self, dim: int) -> FileTensor:
        """Insert a dimension of length 1."""
        dim %= self.ndim + 1
        parts = tuple(
            replace(
                part,
                dims=(*part.dims[:dim], None, *part.dims[dim:]),
                at=(*part.at[:dim], 0, *part.at[dim:]),
                lengths=(*part.lengths[:dim], 1, *part.lengths[dim:]),
            )
            for part in self.parts
        )
        return FileTensor((*self.shape[:dim], 1, *self.shape[dim:]), parts)

    def __getattr__(self, name: str) -> Any:
        """Refuse every other use.

        Raises:
            CannotFollowError: Always; for the names that Python itself looks up, an AttributeError.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotFollowError(f"transformers converts {sorted(self.names)[0]} by .{name}, which is no slice of it")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out the few functions of torch that only slice or concatenate tensors."""
        known = _FUNCTIONS.get(getattr(func, "__name__", ""))
        if known is None:
            raise CannotFollowError(f"transformers converts weights by {func}, which is more than taking slices")
        return known(*args, **(kwargs or {}))


def _chunk(tensor: FileTensor, chunks: int, dim: int = 0) -> tuple[FileTensor, ...]:
    return _split(tensor, max(-(-tensor.shape[dim] // chunks), 1), dim)


def _split(tensor: FileTensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[FileTensor, ...]:
    dim %= tensor.ndim
    sizes, total = split_size_or_sections, tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True))


def _unbind(tensor: FileTensor, dim: int = 0) -> tuple[FileTensor, ...]:
    return tuple(piece.squeeze(dim) for piece in _split(tensor, 1, dim))


def _cat(tensors: Sequence[FileTensor], dim: int = 0) -> FileTensor:
    dim %= tensors[0].ndim
    parts: list[Part] = []
    running = 0
    for tensor in tensors:
        parts += [replace(part, at=_replaced(part.at, dim, part.at[dim] + running)) for part in tensor.parts]
        running += tensor.shape[dim]
    return FileTensor(_replaced(tensors[0].shape, dim, running), tuple(parts))


def _stack(tensors: Sequence[FileTensor], dim: int = 0) -> FileTensor:
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index:][1:])


def _without(values: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return (*values[:index], *values[index + 1 :])


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "chunk": _chunk,
    "split": _split,
    "unbind": _unbind,
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
}


# ---- keys in files ---------------------------------------------------------------------------------------------------


def file_tensors(module: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FileTensor]:
    """Return the file tensors that transformers would write for a model.

    Args:
        module: Its conversions are used where it is a model of transformers; else every tensor is stored as it is.
        shapes: Of the model's tensors, by name.

    Returns:
        By key in the file. A model tensor may be in several file tensors (experts), and the other way around.

    Raises:
        CannotFollowError: A conversion does more than slice and concatenate tensors.
    """
    plain: Any = {name: FileTensor.of(name, shape) for name, shape in shapes.items()}
    if not _is_of_transformers(module):
        return dict(plain)
    from transformers.core_model_loading import revert_weight_conversion

    with with_own_classes(module):
        return dict(revert_weight_conversion(module, plain))


def other_file_keys(module: Any, keys: Iterable[str]) -> dict[str, str]:
    """Return the names to which transformers renames keys of older files.

    Args:
        module: A model; nothing is renamed where it is none of transformers.
        keys: In the file.

    Returns:
        From key to name in the model.
    """
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
    """Return the keys of a tensor: as it is, and with or without the prefix of the base model.

    A checkpoint of `LlamaModel` has `layers.0...`, one of `LlamaForCausalLM` `model.layers.0...`.
    """
    prefix = getattr(module, "base_model_prefix", "")
    if not isinstance(prefix, str) or not prefix:
        return (key,)
    dot = f"{prefix}."
    return (key, key.removeprefix(dot)) if key.startswith(dot) else (key, dot + key)


def map_keys(keys: Iterable[str], key_mapping: KeyMapping | None) -> dict[str, str]:
    """Map keys, as renamed by the user's mapping, to keys in the file.

    Raises:
        ConfigurationError: The mapping is of another kind, or no regular expression.
        CheckpointError: It gives two tensors one name.
    """
    rename = _renaming(key_mapping)
    found: dict[str, str] = {}
    for key in keys:
        name = rename(key)
        if name in found:
            raise CheckpointError(
                f"key_mapping gives {found[name]!r} and {key!r} the same name {name!r}; make it tell them apart"
            )
        found[name] = key
    return found


def _renaming(key_mapping: KeyMapping | None) -> Callable[[str], str]:
    if key_mapping is None:
        return lambda key: key
    if not isinstance(key_mapping, Mapping):
        if not callable(key_mapping):
            raise ConfigurationError(
                f"key_mapping is a {type(key_mapping).__name__}; give a dict from regular expressions to replacements, "
                "or a function from key to name"
            )
        return key_mapping
    try:
        patterns = [(re.compile(pattern), replacement) for pattern, replacement in key_mapping.items()]
    except (re.error, TypeError) as error:
        raise ConfigurationError(
            f"key_mapping {dict(key_mapping)} is no set of regular expressions: {error}"
        ) from error

    def rename(key: str) -> str:
        for pattern, replacement in patterns:
            key = pattern.sub(replacement, key, count=1)
        return key

    return rename


def is_ignored(module: nn.Module, attribute: str, names: Sequence[str]) -> bool:
    """Return whether a model declares that a tensor may be missing, or may be unexpected.

    Args:
        module: The model.
        attribute: `_keys_to_ignore_on_load_missing` or `_keys_to_ignore_on_load_unexpected`: regular expressions.
        names: All names of one tensor.
    """
    patterns: Any = getattr(module, attribute, None) or ()
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _is_of_transformers(module: nn.Module) -> bool:
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__
    )
