"""What the tensors of a model are called in Hugging Face files, and of which parts of them file tensors consist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from megatron_fsdp.checkpoint.hf.own_classes import with_own_classes
from megatron_fsdp.checkpoint.hf.parts import FileTensor
from megatron_fsdp.errors import CheckpointError, ConfigurationError

KeyMapping = Mapping[str, str] | Callable[[str], str]
"""From keys in files to names in the model: regular expressions with their replacements, applied one after another,
each to its first match (as by `re.sub(..., count=1)`), or a function."""


def file_tensors(module: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FileTensor]:
    """The file tensors that transformers would write of a model.

    Args:
        module: Its conversions are used where it is a model of transformers; else every tensor is stored as it is.
        shapes: Of the model's tensors, by name.

    Returns:
        By key in the file. A model tensor may be in several file tensors (experts), and the other way around.

    Raises:
        CannotFollowError: A conversion does more than take tensors apart and put them together.
    """
    plain: Any = {name: FileTensor.of(name, shape) for name, shape in shapes.items()}
    if not _is_of_transformers(module):
        return dict(plain)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 files and models had the same keys
        return dict(plain)
    with with_own_classes(module):
        return dict(revert_weight_conversion(module, plain))


def other_file_keys(module: Any, keys: Iterable[str]) -> dict[str, str]:
    """What transformers renames keys of older files to, of those that it renames.

    Args:
        module: A model; nothing is renamed where it is none of transformers.
        keys: In the file.

    Returns:
        From key to name in the model.
    """
    if not _is_of_transformers(module):
        return {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, apply_renamings
    except ImportError:
        return {}
    with with_own_classes(module):
        conversions = get_model_conversion_mapping(module)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    renamed = {key: apply_renamings(key, renamings) for key in keys}
    return {key: name for key, name in renamed.items() if name != key}


def key_variants(module: nn.Module, key: str) -> tuple[str, ...]:
    """Keys under which a tensor may be stored: as it is, and with or without the prefix of the base model.

    A checkpoint of `LlamaModel` has `layers.0...`, one of `LlamaForCausalLM` `model.layers.0...`.
    """
    prefix = getattr(module, "base_model_prefix", "")
    if not isinstance(prefix, str) or not prefix:
        return (key,)
    dot = f"{prefix}."
    return (key, key.removeprefix(dot)) if key.startswith(dot) else (key, dot + key)


def map_keys(keys: Iterable[str], key_mapping: KeyMapping | None) -> dict[str, str]:
    """From keys as the user wants them read to keys in the file.

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
    """Whether a model declares that it does not matter if such a tensor is missing, or is there.

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
