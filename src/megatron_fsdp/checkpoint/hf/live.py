"""The tensors of a live model, under any wrappers and adapters, and their counterparts in Hugging Face files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from megatron_fsdp.checkpoint.folder import whole_box
from megatron_fsdp.checkpoint.rearranged import Part
from megatron_fsdp.dtensor.tensor import UnevenDTensor, boxes_here
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.shards import Box

LocalBox = tuple[Box, torch.Tensor]

_TORCH_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_IN_NAMES = {"_orig_mod", "_checkpoint_wrapped_module"}
_COPIES = {"modules_to_save", "original_module", "token_adapter", "trainable_tokens_delta"}
"""Modules of peft that hold whole copies of base weights."""


@dataclass(frozen=True)
class LiveTensor:
    """A parameter or persistent buffer of an unwrapped model; tied ones have several names, `name` is the first."""

    name: str
    aliases: tuple[str, ...]
    tensor: torch.Tensor
    is_parameter: bool

    @property
    def as_saved(self) -> torch.Tensor:
        """The tensor as checkpoints have it: for experts divided over ranks, this rank's part of all experts."""
        if (engine := _engine_of(self.tensor)) is None:
            return self.tensor
        group, index = engine.group_and_index[id(self.tensor)]  # under its own name: `name` may lack parts of peft's
        saved: torch.Tensor = engine.expert_names.as_saved(group.names[index], self.tensor)
        return saved

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global tensor."""
        return tuple(self.as_saved.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the main weight."""
        return self.tensor.dtype

    @property
    def is_saved_here(self) -> bool:
        """True if this rank saves its boxes."""
        tensor = self.as_saved
        return not isinstance(tensor, UnevenDTensor) or tensor.shard_spec.description.is_saved_here

    def local_boxes(self) -> list[LocalBox]:
        """Return this rank's non-empty boxes of the global tensor with views of their elements.

        Collective for DTensors that are not of this library.
        """
        tensor = self.as_saved.detach()
        if tensor.device.type == "meta":
            raise CheckpointError(f"{self.name} is on the meta device; initialise the model before loading or saving")
        if not isinstance(tensor, DTensor):
            return [(whole_box(tensor.shape), tensor)] if tensor.numel() else []
        if isinstance(tensor, UnevenDTensor) and tensor.shard_spec.problem is not None:
            raise CheckpointError(tensor.shard_spec.problem)
        local, boxes = tensor._local_tensor, [box for box in boxes_here(tensor) if box.numel]
        if len(boxes) <= 1:
            return [(box, local.view(box.lengths)) for box in boxes]
        parts = local.view(-1).split([box.numel for box in boxes])
        return [(box, part.view(box.lengths)) for box, part in zip(boxes, parts, strict=True)]


def keep_local(boxes: Sequence[LocalBox], full: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor into its memory."""
    for box, view in boxes:
        view.copy_(full[box.indices])


# ---- the model inside of wrappers ------------------------------------------------------------------------------------


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside our wrapper and torch's; a model whose only child is called `module` is no wrapper."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model is a {type(model).__name__}; give an nn.Module, sharded or not")
    for engine in engines_of(model):
        engine.refuse_open_iteration("files were to be written or read")
    while True:
        if hasattr(model, "parameter_groups") and not all(hasattr(param, _ENGINE) for param in model.parameters()):
            raise ConfigurationError(
                "the model shows full parameters at the moment (inside of a forward, or of full_parameters_context); "
                "load and save outside of that"
            )
        compiled = model._modules.get("_orig_mod")
        if compiled is not None:
            model = compiled
            continue
        inner = getattr(model, "module", None)
        # Ours cannot be imported into this layer, so it is known by its method.
        is_wrapper = isinstance(model, _TORCH_WRAPPERS) or hasattr(type(model), "install_optimized_model_weights")
        if not is_wrapper or not isinstance(inner, nn.Module):
            return model
        model = inner


_ENGINE = "_fsdp_engine"  # on a sharded parameter


def _engine_of(tensor: torch.Tensor) -> Any:
    """Return the engine that shards a parameter, which cannot be imported into this layer; None for others."""
    reference = getattr(tensor, _ENGINE, None)
    return None if reference is None else reference()


def engines_of(model: nn.Module) -> list[Any]:
    """List the engines that shard parameters of a model, each once."""
    found = (_engine_of(param) for param in model.parameters())
    return list(dict.fromkeys(engine for engine in found if engine is not None))


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module that torch's `fully_shard` may have wrapped: `LlamaModel`, not `FSDPLlamaModel`."""
    kinds: Any = type(module).__mro__
    found: type[nn.Module] = next(kind for kind in kinds if not issubclass(kind, FSDPModule))
    return found


@contextlib.contextmanager
def with_own_classes(module: nn.Module) -> Iterator[None]:
    """Restore the modules' own classes inside the block: transformers looks conversions up by class name."""
    changed: list[tuple[Any, type]] = [(part, type(part)) for part in module.modules() if isinstance(part, FSDPModule)]
    for part, _ in changed:
        part.__class__ = own_class(part)
    try:
        yield
    finally:
        for part, kind in changed:
            part.__class__ = kind


def install_weights(model: nn.Module, tensors: list[LiveTensor]) -> None:
    """Update the compute weights from the main weights that were written."""
    engines = {id(engine): engine for live in tensors if (engine := _engine_of(live.tensor)) is not None}
    for engine in engines.values():
        engine.install_main_weights()
    install: Any = getattr(model, "install_optimized_model_weights", None)
    if not engines and install is not None:
        install()


# ---- its tensors -----------------------------------------------------------------------------------------------------


def live_tensors(module: nn.Module) -> list[LiveTensor]:
    """List parameters and persistent buffers of an unwrapped model, each once, in the order of its modules."""
    names: dict[int, list[str]] = {}
    first: dict[int, tuple[torch.Tensor, bool]] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        lasting = {name: each for name, each in part._buffers.items() if name not in part._non_persistent_buffers_set}
        for name, tensor in chain(part._parameters.items(), lasting.items()):
            if tensor is not None:
                names.setdefault(id(tensor), []).append(_without_wrappers(f"{prefix}.{name}" if prefix else name))
                first.setdefault(id(tensor), (tensor, name in part._parameters))
    told: Any = getattr(module, "all_tied_weights_keys", None)
    tied = told if isinstance(told, dict) else ()  # names that transformers leaves out of files
    found = []
    for key, (tensor, is_parameter) in first.items():
        own = [name for name in names[key] if name not in tied] or names[key]
        found.append(LiveTensor(own[0], tuple(names[key]), tensor, is_parameter))
    return found


def _without_wrappers(name: str) -> str:
    """Drop the parts of a name that compiled and checkpointed modules have added."""
    return ".".join(part for part in name.split(".") if part not in _IN_NAMES)


def base_tensors(module: nn.Module) -> tuple[nn.Module, list[LiveTensor]]:
    """Return an unwrapped model and its tensors; for a peft model the base, with its names before wrapping."""
    if not getattr(module, "peft_config", None):
        return module, live_tensors(module)
    peft_model: Any = module
    base, tuner_prefix = module, "lora_"
    if hasattr(module, "get_base_model"):  # not where transformers' own add_adapter put them in
        base = peft_model.get_base_model()
        tuner_prefix = str(getattr(peft_model.base_model, "prefix", tuner_prefix))
    added: set[str] = set()  # modules that adapters have added, as peft's layers list them
    for name, part in base.named_modules():
        listed: Any = (getattr(part, "adapter_layer_names", ()), getattr(part, "other_param_names", ()))
        added.update(
            _without_wrappers(f"{name}.{own}") for names in listed if isinstance(names, tuple) for own in names
        )
    found = []
    for tensor in live_tensors(base):
        parts = tensor.name.split(".")
        if _COPIES.intersection(part for alias in tensor.aliases for part in alias.split(".")):
            raise ConfigurationError(
                f"{tensor.name}: adapters with modules_to_save or trainable tokens hold copies of base weights; load "
                "the base model before adding the adapters"
            )
        is_added = any(".".join(parts[:count]) in added for count in range(1, len(parts) + 1))
        if not is_added and not any(part.startswith(tuner_prefix) for part in parts):
            aliases = tuple(_without_base_layer(alias) for alias in tensor.aliases)
            found.append(replace(tensor, name=_without_base_layer(tensor.name), aliases=aliases))
    return base, found


def _without_base_layer(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")


# ---- their counterparts in files -------------------------------------------------------------------------------------
#
# transformers keeps some weights in memory in another form than in files: the experts of a layer are one tensor, of
# which every file tensor is a slice. Its own conversions run here on tensors of the meta device, so nothing is copied:
# a slice is a view, and its strides and offset tell which part of the model tensor it is.

KeyMapping = Mapping[str, str] | Callable[[str], str]
"""From keys in files to names in the model: regular expressions with their replacements, applied one after another,
each to its first match (as by `re.sub(..., count=1)`), or a function."""


class CannotFollowError(CheckpointError):
    """Raised when a conversion does more than slice and concatenate tensors."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, the target of disjoint parts of model tensors."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> FileTensor:
        """Return a file tensor that is one whole model tensor."""
        return cls(tuple(shape), (Part.whole(name, shape),))

    @property
    def names(self) -> set[str]:
        """The names of the model tensors it consists of."""
        return {part.key for part in self.parts}


class Followed(TorchFunctionMode):
    """Traces the tensors made of a model's inside the block: slices, and their concatenations.

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
        """Run a function of torch, and record its concatenations."""
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
        """Return the parts of the model's tensors that a tensor holds."""
        return FileTensor(tuple(tensor.shape), tuple(self._parts(tensor, (0,) * tensor.ndim)))

    def _parts(self, tensor: torch.Tensor, at: tuple[int, ...]) -> Iterator[Part]:
        storage = _storage(tensor)
        whole, dim, pieces = self._joined.get(storage, (None, 0, []))
        if whole is not None and _layout(tensor) == _layout(whole):
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


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _slice_of(name: str, whole: torch.Tensor, view: torch.Tensor, at: tuple[int, ...]) -> Part:
    """Return the box of a contiguous tensor that a view shows: from its first to its last element."""
    box = whole_box(whole.shape)
    if view.numel() and _layout(view) != _layout(whole):
        first = int(view.storage_offset())
        last = first + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
        start, end = (tuple(map(int, np.unravel_index(place, whole.shape))) for place in (first, last))
        box = Box(start, tuple(to - of + 1 for of, to in zip(start, end, strict=True)))
    if min(box.lengths, default=1) < 0 or _layout(view.squeeze()) != _layout(whole[box.indices].squeeze()):
        raise CannotFollowError(f"transformers stores of {name} what is no slice of it, such as its transpose")
    return Part(name, box, Box(at, tuple(view.shape)))


# ---- keys in files ---------------------------------------------------------------------------------------------------


def file_tensors(module: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FileTensor]:
    """Return transformers' file tensors by key; a model tensor may be in several (experts)."""
    if not _is_of_transformers(module):
        return {name: FileTensor.of(name, shape) for name, shape in shapes.items()}
    from transformers.core_model_loading import revert_weight_conversion

    with with_own_classes(module), Followed(shapes) as followed:
        stored = revert_weight_conversion(module, dict(followed.tensors))
    return {key: followed.file_tensor(tensor) for key, tensor in stored.items()}


def other_file_keys(module: Any, keys: Iterable[str]) -> dict[str, str]:
    """Return the model's names to which transformers renames keys of older files, by key."""
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
    """Return the possible keys of a tensor: its own, with and without the base model's prefix (as of `LlamaModel`)."""
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
    """Return True if a model declares that a tensor may be missing, or may be unexpected."""
    patterns: Any = getattr(module, attribute, None) or ()
    return any(re.search(pattern, name) for pattern in patterns for name in names)


def _is_of_transformers(module: nn.Module) -> bool:
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.") for cls in type(module).__mro__
    )
