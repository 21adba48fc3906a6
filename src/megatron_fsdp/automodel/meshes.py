"""The device meshes of the strategies: their axes, the order of these, and axes flattened from several."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but its re-export is not marked
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.automodel.config import (
    DDPConfig,
    DistributedConfig,
    FSDP2Config,
    MoEParallelizerConfig,
    ParallelismSizes,
    ParallelSizes,
    check_config,
    resolve_sizes,
)
from megatron_fsdp.comm.agreement import agreed, all_agree
from megatron_fsdp.comm.groups import bound_device, set_timeout
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, explains_restarts, warn_caller

FSDP2_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MEGATRON_AXES = ("dp", "cp", "tp")
EXPERT_AXES = ("ep_shard", "ep")
"""Outermost first: ranks of the last axis are neighbours."""

_FLATTENED: Mapping[tuple[str, ...], Mapping[str, tuple[str, ...]]] = {
    FSDP2_AXES: {
        "dp": ("dp_replicate", "dp_shard"),
        "dp_shard_cp": ("dp_shard", "cp"),
        "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    },
    MEGATRON_AXES: {"dp_cp": ("dp", "cp")},
}
"""Axes across several: "dp" to share out data, "dp_shard_cp" to shard parameters, "dp_cp" to average over."""


class MeshAxisName(StrEnum):
    """The names of all axes; members equal their strings."""

    PP = "pp"
    DP = "dp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    DP_SHARD_CP = "dp_shard_cp"
    DP_CP = "dp_cp"
    CP = "cp"
    TP = "tp"
    EP = "ep"
    EP_SHARD = "ep_shard"


@dataclass
class MeshContext:
    """The meshes of a model, their sizes and this rank's device; `MeshContext()` has none.

    Attributes:
        device_mesh: FSDP2: (pp, dp_replicate, dp_shard, cp, tp); MegatronFSDP: (dp, cp, tp); DDP: None.
        moe_mesh: (ep_shard, ep) across the ranks of one pipeline stage; None without expert parallelism.
        process_group: The ranks of a model without meshes (DDP); None: all.
        strategy_config: How `parallelize_model` makes a model parallel, as the next two.
        moe_parallel_config: How experts are sharded.
        activation_checkpointing: As of the strategies; False: what the strategy says.
        reapply_trainability: Called with a model once it is parallel, to freeze parameters again; None: nothing.
        sizes: Ranks on each axis; None: those of the meshes.
        device: Where this rank computes; None: the current one of the mesh's type.

    Raises:
        ConfigurationError: A mesh has unknown axis names.
    """

    device_mesh: DeviceMesh | None = None
    moe_mesh: DeviceMesh | None = None
    process_group: dist.ProcessGroup | None = None
    strategy_config: DistributedConfig | None = None
    moe_parallel_config: MoEParallelizerConfig | None = None
    activation_checkpointing: bool | str = False
    reapply_trainability: Callable[[nn.Module], object] | None = None
    sizes: ParallelSizes = None  # type: ignore[assignment]  # these two are found where they are not given
    device: torch.device = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        names = [name for mesh in (self.device_mesh, self.moe_mesh) if mesh for name in mesh.mesh_dim_names or ()]
        known = {axis.value for axis in MeshAxisName}
        if unknown := [name for name in names if name not in known]:
            raise ConfigurationError(
                f"unknown axis names {unknown}; name the axes of a mesh {', '.join(sorted(known))}"
            )
        own: Any = self
        if own.device is None:
            own.device = torch.device("cpu" if self.device_mesh is None else self.device_mesh.device_type)
        if own.sizes is None:
            shard = self.dp_shard_size if self._size("dp_shard") else self.dp_size or 1
            others = (self.tp_size, self.pp_size, self.cp_size, self.ep_size)
            own.sizes = ParallelSizes(self.dp_replicate_size or 1, shard, *others)

    def _size(self, name: str) -> int | None:
        """Return the ranks on an axis, flattened ones included; None if there is none."""
        mesh = self.moe_mesh if name in EXPERT_AXES else self.device_mesh
        if mesh is None:
            return None
        try:
            return get_flat_mesh(mesh, name).size()
        except ConfigurationError:
            return None

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self._size("tp") or 1

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel ranks."""
        return self._size("pp") or 1

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks."""
        return self._size("cp") or 1

    @property
    def ep_size(self) -> int:
        """Expert-parallel ranks."""
        return self._size("ep") or 1

    @property
    def dp_size(self) -> int | None:
        """Data-parallel ranks, copies included; None without a mesh."""
        return self._size("dp")

    @property
    def dp_replicate_size(self) -> int | None:
        """Copies of the sharded model; None without such an axis."""
        return self._size("dp_replicate")

    @property
    def dp_shard_size(self) -> int:
        """Data-parallel ranks that share one copy."""
        return self._size("dp_shard") or 1

    @property
    def pp_enabled(self) -> bool:
        """True with several pipeline stages."""
        return self.pp_size > 1

    def parallelize_axis_kwargs(self) -> dict[str, Any]:
        """Return the names of the axes that a stage is made parallel over; None for those that do not exist."""
        shards = ("dp_replicate", "dp_shard_cp") if self._size("dp_replicate") else ("dp_shard_cp",)
        return {
            "dp_axis_names": shards,
            **{f"{axis}_axis_name": axis if self._size(axis) else None for axis in ("cp", "tp", "ep")},
            "ep_shard_axis_names": ("ep_shard",) if self._size("ep_shard") else None,
        }

    def pipeline_axis_kwargs(self) -> dict[str, Any]:
        """Return `parallelize_axis_kwargs`, and the name of the pipeline's axis."""
        return {**self.parallelize_axis_kwargs(), "pp_axis_name": "pp" if self._size("pp") else None}

    @classmethod
    def build(
        cls,
        strategy_config: DistributedConfig,
        parallelism_sizes: ParallelismSizes | None = None,
        *,
        world_size: int | None = None,
        timeout_minutes: float | None = None,
        ranks: Sequence[int] | None = None,
    ) -> MeshContext:
        """Check the sizes and build the meshes; collective.

        Args:
            strategy_config: The strategy.
            parallelism_sizes: None: as many data-parallel ranks as there are ranks.
            world_size: None: what torch.distributed says; another number is refused.
            timeout_minutes: Of the meshes' process groups; None: torch's default.
            ranks: All ranks; others are not supported yet.

        Raises:
            ParallelSizeError: See `resolve_sizes`.
            ConfigurationError: The strategy is none, or `world_size` is not the number of ranks.
            NotSupportedYetError: `ranks` leaves ranks out.
        """
        with all_agree("building the meshes") as facts:
            if isinstance(strategy_config, str):
                raise ConfigurationError(
                    f"Unknown distributed strategy config type str ({strategy_config!r}); give an FSDP2Config, a "
                    "MegatronFSDPConfig or a DDPConfig, or its name to DistributedSetup.build"
                )
            device = set_up_ranks(check_config(strategy_config).backend, timeout_minutes)
            check_all_ranks(world_size, ranks)
            sizes = parallelism_sizes or ParallelismSizes()
            resolved = resolve_sizes(strategy_config, dist.get_world_size(), **vars(sizes))
            facts |= {"the strategy": type(strategy_config).__name__, "sizes": str(resolved)}
        made = _meshes(strategy_config, resolved, device.type)
        if timeout_minutes is not None:
            for mesh in filter(None, made):
                flattened = mesh._get_root_mesh()._flatten_mapping.values()
                for group in (*mesh.get_all_groups(), *(flat.get_group() for flat in flattened)):
                    set_timeout(timedelta(minutes=timeout_minutes), group)
        return cls(*made, strategy_config=strategy_config, sizes=resolved, device=device)

    @classmethod
    def from_meshes(cls, *meshes: Any, **named: Any) -> MeshContext:
        """Build a context from existing meshes.

        `from_meshes(device_mesh, moe_mesh=None)` looks at the meshes only, and None is none. With the strategy before
        them, `from_meshes(config, device_mesh, moe_mesh=None)`, they have to be those of this strategy and these ranks;
        collective if a flattened axis is missing.

        Raises:
            ConfigurationError: A mesh has other axes, or DDP is given one.
            ParallelSizeError: The sizes of the axes do not fit the strategy or the ranks.
        """
        names = ("device_mesh", "moe_mesh")
        config = named.pop("config", None)
        if meshes and not isinstance(meshes[0], DeviceMesh | None) and not hasattr(meshes[0], "mesh_dim_names"):
            config, meshes = meshes[0], meshes[1:]
        given = {**dict.fromkeys(names), **dict(zip(names, meshes, strict=False)), **named}
        context = cls(**given)
        return context if config is None else context._checked(check_config(config))

    def _checked(self, config: DistributedConfig) -> MeshContext:
        """Return this context for a strategy; raise if its meshes are not those of the strategy and the ranks."""
        axes = FSDP2_AXES if isinstance(config, FSDP2Config) else MEGATRON_AXES
        names = [None if mesh is None else mesh.mesh_dim_names for mesh in (self.device_mesh, self.moe_mesh)]
        if isinstance(config, DDPConfig) or names[0] != axes or names[1] not in (None, EXPERT_AXES):
            raise ConfigurationError(
                f"device_mesh has the axes {names[0]} and moe_mesh {names[1]}, and {type(config).__name__} takes "
                f"{'none' if isinstance(config, DDPConfig) else f'{axes} and {EXPERT_AXES} or None'}; make them by "
                "create_device_mesh(config, ...), or give sizes"
            )
        assert self.device_mesh is not None
        _add_flattened(self.device_mesh)
        sizes = resolve_sizes(config, dist.get_world_size(), **self.sizes.arguments())
        return replace(self, strategy_config=config, sizes=sizes, device=set_up_ranks(config.backend))

    def axis(self, name: str) -> DeviceMesh:
        """Return one axis, flattened ones included.

        Raises:
            ConfigurationError: There is none of the name.
        """
        if self.device_mesh is None:
            raise ConfigurationError(f"there is no mesh, so no axis {name!r}; DDP has none")
        return get_flat_mesh(self.device_mesh, name)

    @property
    def data_rank(self) -> int:
        """The index of this rank's part of the data, below `sizes.dp`.

        Tensor-, context- and pipeline-parallel ranks read the same part; context-parallel ones cut its sequences by
        `shard_batch`.
        """
        if self.device_mesh is None:
            return dist.get_rank()
        return self.axis("dp").get_local_rank()

    def gradient_axis(self) -> DeviceMesh:
        """Return the mesh over which gradients of dense parameters are averaged: data- and context-parallel ranks.

        Raises:
            ConfigurationError: There is no mesh.
        """
        is_engine = self.device_mesh is not None and self.device_mesh.mesh_dim_names == MEGATRON_AXES
        return self.axis("dp" if is_engine and self.sizes.cp == 1 else "dp_cp")


def build_mesh_context(config: DistributedConfig, **sizes: int | None) -> MeshContext:
    """Check the sizes and build the meshes; collective. Process groups are created if there are none.

    Args:
        config: The strategy.
        sizes: `dp_size`, `dp_replicate_size`, `tp_size`, `pp_size`, `cp_size` and `ep_size`, as of `resolve_sizes`.

    Raises:
        ParallelSizeError: See `resolve_sizes`.
    """
    return MeshContext.build(config, ParallelismSizes(**sizes))


def create_device_mesh(
    config: DistributedConfig, *, world_size: int | None = None, **sizes: int | None
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Build the mesh and the mesh of experts, as `build_mesh_context` does; (None, None) for DDP.

    Args:
        config: The strategy.
        world_size: None: what torch.distributed says; another number is refused.
        sizes: As of `build_mesh_context`.

    Raises:
        ParallelSizeError: See `resolve_sizes`.
        ConfigurationError: `world_size` is not the number of ranks.
    """
    context = MeshContext.build(config, ParallelismSizes(**sizes), world_size=world_size)
    return context.device_mesh, context.moe_mesh


def set_up_ranks(backend: str, timeout_minutes: float | None = None) -> torch.device:
    """Initialise torch.distributed if needed; return this rank's device.

    Under torchrun the default group has all ranks; in a program started without it, only this one. Where there is a
    group of NCCL or gloo already, its back end says where ranks compute. Without an accelerator, "nccl" (the default of
    the configs) falls back to CPUs with a warning.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    there = str(dist.get_backend()) if dist.is_initialized() else ""
    if there in ("nccl", "gloo"):
        backend = there
    elif backend == "nccl" and accelerator is None:
        warn_caller("backend='nccl', but there is no accelerator here: ranks compute on CPUs; write backend='gloo'")
        backend = "gloo"
    if backend == "gloo" or accelerator is None:
        device = torch.device("cpu")
    else:
        local_rank = os.environ.get("LOCAL_RANK")  # without torchrun, the program has chosen its device itself
        local = torch.accelerator.current_device_index() if local_rank is None else int(local_rank)
        local %= torch.accelerator.device_count()
        device = torch.device(accelerator.type, local)
        torch.accelerator.set_device_index(local)
    if not dist.is_initialized():
        options: dict[str, Any] = {"device_id": bound_device(backend, device)}
        if timeout_minutes is not None:
            options["timeout"] = timedelta(minutes=timeout_minutes)
        if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
            options |= {"store": HashStore(), "rank": 0, "world_size": 1}
        with explains_restarts():
            dist.init_process_group(backend, **options)
    return device


@dataclass(frozen=True)
class DistInfo:
    """This process among all.

    Attributes:
        backend: Of the default process group.
        rank: This process's number.
        world_size: Number of processes.
        device: The accelerator that it computes on; None on CPUs.
        is_main: True on the first rank.
    """

    backend: str
    rank: int
    world_size: int
    device: torch.device | None
    is_main: bool


def initialize_distributed(backend: str, timeout_minutes: float = 1) -> DistInfo:
    """Initialise torch.distributed, unless it is, and wait for all ranks; the group is destroyed at exit.

    Args:
        backend: "nccl" or "gloo"; where a group exists already its back end decides.
        timeout_minutes: Of the default group, where it is made here.
    """
    was_there = dist.is_initialized()
    device = set_up_ranks(backend, timeout_minutes)
    if not was_there:
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    if dist.get_world_size() > 1:
        dist.barrier()
    on_accelerator = None if device.type == "cpu" else device
    return DistInfo(
        str(dist.get_backend()), dist.get_rank(), dist.get_world_size(), on_accelerator, dist.get_rank() == 0
    )


def get_flat_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return one axis of a mesh or of its root, flattened ones included."""
    if name in (mesh.mesh_dim_names or ()):
        return mesh if mesh.ndim == 1 else mesh[name]
    root = mesh._get_root_mesh()
    found: DeviceMesh | None = root._flatten_mapping.get(name)
    if found is None:
        known = [*(root.mesh_dim_names or ()), *root._flatten_mapping]
        raise ConfigurationError(f"the mesh has no axis {name!r}; it has {', '.join(known)}")
    return found


def get_submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return several axes of a mesh as one, flattened ones included."""
    if all(name in (mesh.mesh_dim_names or ()) for name in names):
        return mesh[tuple(names)]
    return DeviceMesh._concatenate([get_flat_mesh(mesh, name) for name in names])


def get_fsdp_dp_mesh(
    mesh: DeviceMesh, dp_replicate_name: str = "dp_replicate", dp_shard_cp_name: str | None = None
) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards, context-parallel ranks included: (shards) or (replicas, shards)."""
    shards = dp_shard_cp_name or ("dp_shard_cp" if get_flat_mesh(mesh, "cp").size() > 1 else "dp_shard")
    if get_flat_mesh(mesh, dp_replicate_name).size() > 1:
        return get_submesh(mesh, (dp_replicate_name, shards))
    return get_flat_mesh(mesh, shards)


@agreed("making a mesh", lambda *_, **__: ())
def create_ring_ulysses_mesh(mesh: DeviceMesh, *, ring_degree: int, ulysses_degree: int) -> DeviceMesh:
    """Return the context-parallel ranks of a mesh as a 2-D mesh ("ring", "ulysses"); collective.

    Raises:
        ConfigurationError: The degrees do not multiply to the number of ranks.
    """
    ranks = get_flat_mesh(mesh, "cp")
    if ring_degree * ulysses_degree != ranks.size():
        raise ConfigurationError(
            f"ring_degree x ulysses_degree = {ring_degree} x {ulysses_degree}, but cp_size is {ranks.size()}; give "
            "degrees that multiply to it"
        )
    made: DeviceMesh = ranks._unflatten(0, (ring_degree, ulysses_degree), ("ring", "ulysses"))
    return made


def get_megatron_dp_axis(mesh: DeviceMesh) -> str:
    """Return the name of the engine's sharding axis, which includes context-parallel ranks."""
    return "dp_cp" if get_flat_mesh(mesh, "cp").size() > 1 else "dp"


def check_all_ranks(world_size: int | None, ranks: Sequence[int] | None) -> None:
    """Raise unless the arguments are None, or the number of ranks and all of them in order."""
    there = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size not in (None, there):
        raise ConfigurationError(f"world_size={world_size}, but there are {there} ranks; leave it out")
    if ranks is not None and list(ranks) != list(range(there)):
        raise NotSupportedYetError(
            f"ranks={list(ranks)} of {there} is not supported yet: a mesh has all ranks in order; leave it out, and "
            "start the ranks that train"
        )


def _meshes(
    config: DistributedConfig, sizes: ParallelSizes, device_type: str
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    if isinstance(config, DDPConfig):
        return None, None
    shape: tuple[int, ...] = (sizes.dp, sizes.cp, sizes.tp)
    axes: tuple[str, ...] = MEGATRON_AXES
    if isinstance(config, FSDP2Config):
        shape, axes = (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp), FSDP2_AXES
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=axes)
    _add_flattened(mesh)
    if sizes.ep == 1:
        return mesh, None
    experts = init_device_mesh(
        device_type, (sizes.pp, sizes.ep_shard, sizes.ep), mesh_dim_names=("pp_of_experts", *EXPERT_AXES)
    )
    return mesh, experts[EXPERT_AXES]


def _add_flattened(mesh: DeviceMesh) -> None:
    """Add the missing axes across several."""
    axes = mesh.mesh_dim_names
    assert axes is not None
    for name, parts in _FLATTENED[axes].items():
        if name not in mesh._get_root_mesh()._flatten_mapping and (axes != MEGATRON_AXES or mesh["cp"].size() > 1):
            mesh[parts]._flatten(name)
