"""What all ranks have to be told alike, compared before anything that a rank could be left alone in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fsdp.automodel.config import DistributedConfig, FSDP2Config, check_config
from megatron_fsdp.automodel.meshes import MeshContext, build_mesh_context, set_up_ranks
from megatron_fsdp.automodel.sizes import resolve_sizes
from megatron_fsdp.checkpoint.agree import together

# Text of values that ranks compare: the same in every process that was given the same.
#
# `repr` is not: strings are hashed by a seed of each process, so sets show their elements in another order, and objects
# without a `repr` of their own show where they lie in memory.

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def canonical_facts(given: Mapping[str, Any]) -> dict[str, str]:
    """The text of each value, of a dataclass of each field ("peft_config.r"), so that what differs is named."""
    facts = {}
    for name, value in given.items():
        if is_dataclass(value) and not isinstance(value, type):
            facts[name] = type(value).__name__
            facts |= canonical_facts({f"{name}.{field.name}": getattr(value, field.name) for field in fields(value)})
        else:
            facts[name] = canonical_text(value)
    return facts


def canonical_text(value: Any) -> str:
    """A `repr` with the elements of sets and the keys of mappings sorted, of all fields of dataclasses, at any depth.

    Other objects show their own `repr` without addresses; those that have none are told apart by their class alone.
    """
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{field.name}={canonical_text(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inner})"
    if isinstance(value, Mapping):
        items = sorted((canonical_text(key), canonical_text(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, AbstractSet):
        return "{" + ", ".join(sorted(map(canonical_text, value))) + "}"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(canonical_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return _ADDRESS.sub("", repr(value))


def agree_on(
    distributed_config: DistributedConfig | None,
    sizes: Mapping[str, int | None],
    find: Callable[[], tuple[Path | None, Any]],
    options: Mapping[str, Any],
) -> tuple[DistributedConfig, MeshContext, Path | None, Any]:
    """Check what ranks were given, each by itself and against each other, and then build the meshes; collective.

    Args:
        distributed_config: The strategy; None: `FSDP2Config()`.
        sizes: As `resolve_sizes` takes them.
        find: Gives the folder of the model, if any, and its config.
        options: Other arguments that must be the same on every rank.

    Returns:
        The strategy, its meshes, the folder and the config.

    Raises:
        ConfigurationError: Ranks were given different arguments, or one of them is wrong; on every rank.
        CheckpointError: Only some ranks have the folder; on every rank, and names them.
    """
    strategy = FSDP2Config() if distributed_config is None else distributed_config
    set_up_ranks(str(getattr(strategy, "backend", "gloo")))

    def check() -> tuple[Path | None, Any]:
        resolve_sizes(check_config(strategy), dist.get_world_size(), **sizes)
        return find()

    given = {"distributed_config": strategy, **sizes, **options}
    folder, config = together("finding the model", check, facts=canonical_facts(given))
    of_config = {f"config.{name}": value for name, value in config.to_diff_dict().items()}
    together("comparing configs", lambda: None, facts=canonical_facts(of_config))
    return strategy, build_mesh_context(strategy, **sizes), folder, config
