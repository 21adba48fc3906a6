"""Models that read images or sound: find, freeze and shard their towers."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from megatron_fsdp.automodel.architecture import find_layers, lists_of_layers
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, explains_fields

SCOPES = ("all", "language", "vision", "audio", "multimodal")
"""The groups of layers that may be recomputed."""

_VISION = ("visual", "vision_tower", "vision_model", "vit_model", "image_encoder", "vision_encoder")
_AUDIO = ("audio_tower", "audio_encoder", "audio_model")
_PROJECTORS = (
    *("embed_vision", "embed_audio", "mm_projector", "multi_modal_projector", "multimodal_projector"),
    *("vision_projector", "vit_large_projector", "audio_projector"),
)
_FROZEN_SHARDING = ("root", "per_layer", "replicate")


def normalize_activation_checkpointing_scope(scope: Any) -> tuple[str, ...]:
    """Return the scopes of a list, or of text such as "language+vision"; None, "default" and "auto" are "all".

    Raises:
        ConfigurationError: A word is none of `SCOPES`, or "all" stands with another.
    """
    entries = [scope] if scope is None or isinstance(scope, str) else scope
    allowed = f"give {', '.join(SCOPES)}, or several of the last four in a list"
    if not isinstance(entries, Sequence | AbstractSet) or not all(isinstance(e, str | None) for e in entries):
        raise ConfigurationError(f"activation_checkpointing_scope={scope!r}; {allowed}")
    parts = [part for entry in entries for part in (entry or "all").replace("+", ",").split(",")]
    words = [part.strip().lower().replace("-", "_") for part in parts]
    found = tuple(dict.fromkeys("all" if word in ("default", "auto") else word for word in words))
    if not found or set(found) - set(SCOPES) or ("all" in found and len(found) > 1):
        raise ConfigurationError(f"activation_checkpointing_scope={scope!r}; {allowed}")
    return found


def _check_type(path: str, value: object, kind: type, wanted: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"distributed.multimodal.{path} is a {type(value).__name__}; give {wanted}")


@explains_fields
@dataclass(frozen=True)
class CpVisionFrameShardingConfig:
    """Images or frames shared out over context-parallel ranks in the vision tower; not supported yet.

    Attributes:
        enabled: False.
        mesh_dims: The axes that share them.
        min_tokens: Fewest tokens to share out.
        min_frames: Fewest frames.
        min_local_patch_rows: Fewest rows of patches on a rank.
        cost_alpha: Weight of attention against the rest in a frame's cost, or "auto".

    Raises:
        NotSupportedYetError: `enabled` is True.
        TypeError: A value is of another type.
    """

    enabled: bool = False
    mesh_dims: tuple[str, ...] = ("cp",)
    min_tokens: int = 2048
    min_frames: int = 32
    min_local_patch_rows: int = 96
    cost_alpha: float | str = "auto"

    def __post_init__(self) -> None:
        path = "vision.frame_sharding"
        _check_type(f"{path}.enabled", self.enabled, bool, "True or False")
        _check_type(f"{path}.mesh_dims", self.mesh_dims, tuple, "a tuple of names of axes")
        for name in ("min_tokens", "min_frames", "min_local_patch_rows"):
            value = getattr(self, name)
            _check_type(f"{path}.{name}", value, int, "a whole number")
            if value < 1:
                raise ConfigurationError(f"distributed.multimodal.{path}.{name}={value}; give 1 or more")
        if self.enabled:
            raise NotSupportedYetError(
                f"distributed.multimodal.{path}.enabled=True is not supported yet: every context-parallel rank "
                "computes all images; leave it False"
            )


@explains_fields
@dataclass(frozen=True)
class MultimodalVisionConfig:
    """Options of vision towers.

    Attributes:
        frame_sharding: How their images are shared out.

    Raises:
        TypeError: It is of another type.
    """

    frame_sharding: CpVisionFrameShardingConfig = field(default_factory=CpVisionFrameShardingConfig)

    def __post_init__(self) -> None:
        kind = CpVisionFrameShardingConfig
        _check_type("vision.frame_sharding", self.frame_sharding, kind, f"a {kind.__name__}")


@explains_fields
@dataclass(frozen=True)
class MultimodalDistributedConfig:
    """Settings for the towers of models of images, sound and text.

    Attributes:
        frozen_sharding: For towers without a trainable parameter. "root": with the outermost unit, which every rank
            gathers, so that ranks may skip a modality. "per_layer": layer by layer, so that all ranks call them or
            none. "replicate": whole on every rank.
        vision: Of vision towers.

    Raises:
        ConfigurationError: `frozen_sharding` is another word.
        TypeError: `vision` is of another type.
    """

    frozen_sharding: str = "root"
    vision: MultimodalVisionConfig = field(default_factory=MultimodalVisionConfig)

    def __post_init__(self) -> None:
        word = str(self.frozen_sharding).replace("-", "_")
        if word not in _FROZEN_SHARDING:
            raise ConfigurationError(
                f"distributed.multimodal.frozen_sharding={self.frozen_sharding!r}; give {', '.join(_FROZEN_SHARDING)}"
            )
        object.__setattr__(self, "frozen_sharding", word)
        _check_type("vision", self.vision, MultimodalVisionConfig, "a MultimodalVisionConfig")


def _towers(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Return the outermost modules of these names."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in names and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return list(found.values())


def frozen_towers(model: nn.Module) -> list[nn.Module]:
    """Return the towers and projectors, known by their names in transformers, that have parameters and train none."""
    towers = _towers(model, (*_VISION, *_AUDIO, *_PROJECTORS))
    return [tower for tower in towers if any(True for _ in tower.parameters()) and not _trains(tower)]


def layers_to_recompute(model: nn.Module, scope: tuple[str, ...]) -> list[nn.Module]:
    """Return the layers in scope that train something, and for "all" those of the decoder in any case.

    Raises:
        ConfigurationError: There are none.
    """
    decoder = find_layers(model).modules()
    found = [layer for layer in decoder if scope == ("all",) or ("language" in scope and _trains(layer))]
    for kind, names in (("vision", _VISION), ("audio", _AUDIO)):
        if {"all", "multimodal", kind} & set(scope):
            lists = [layers for tower in _towers(model, names) for layers in lists_of_layers(tower)]
            found += [layer for layers in lists for layer in layers.children() if _trains(layer)]
    if not found:
        raise ConfigurationError(
            f"activation_checkpointing_scope={scope}, but {type(model).__name__} has no such layers that train; name "
            "others, or leave it out"
        )
    return list(dict.fromkeys(found))


def _trains(module: nn.Module) -> bool:
    return any(param.requires_grad for param in module.parameters())
