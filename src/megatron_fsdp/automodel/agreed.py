"""What all ranks have to be told alike, compared before anything that a rank could be left alone in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fsdp.automodel.config import DistributedConfig, FSDP2Config, check_config
from megatron_fsdp.automodel.meshes import MeshContext, build_mesh_context, set_up_ranks
from megatron_fsdp.automodel.sizes import resolve_sizes
from megatron_fsdp.canonical import canonical_facts
from megatron_fsdp.checkpoint.ranks import together


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
