"""Process groups and sub-meshes by role, and the rank mesh that parameters of one kind are sharded over."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.agreement import Groups
from megatron_fsdp.comm.collectives import Axis, Traffic, default_device, real_values
from megatron_fsdp.comm.groups import group_over
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError, explains_fields


@explains_fields
@dataclass(eq=False, repr=False)
class FSDPDistributedIndex:
    """Process groups and sub-meshes by role.

    Dimension names may be those of the mesh or of flattened dimensions (data parallel times context parallel, say).

    Args:
        device_mesh: The mesh of dense parameters, on any device type.
        dp_shard_dim: The dimension to shard over.
        dp_outer_dim: The outer dimension of hybrid sharding; requires ``hybrid_fsdp_group``.
        tp_dim: The tensor-parallel dimension, where there is one.
        hybrid_fsdp_group: All ranks of the outer and the sharding dimension.
        hybrid_fsdp_expt_group: All ranks of both dimensions of the expert mesh; made from that mesh if not given.
        hsdp_outer_dp_shard: Shard the optimizer over the outer dimension, too.
        expt_device_mesh: The mesh of expert parameters, with the same dimension names. If it lacks the sharding
            dimension but has one that this was flattened from, experts are sharded over that one; along a missing
            outer or tensor-parallel dimension experts have one rank.
        fsdp_group_ag: A second group of the ranks of ``dp_shard_dim``, for parameter gathers only, which then need not
            queue behind reductions.
        expt_fsdp_group_ag: A second group of the ranks of experts' ``dp_shard_dim``, likewise.

    Attributes:
        use_hybrid_fsdp: True with an outer dimension.
        fsdp_group: Group of the sharding dimension.
        outer_fsdp_group: Group of the outer dimension, or None.
        expt_fsdp_group: Group of the sharding dimension for experts, or None.
        expt_outer_fsdp_group: Group of the outer dimension for experts, or None.
        mesh_library: Sub-meshes by ``(*dimension names, whether for experts)``.

    Raises:
        ConfigurationError: There is no sharding dimension; a dimension does not exist; only one of ``dp_outer_dim`` and
            ``hybrid_fsdp_group`` is given; an argument needs another one that is missing; or the ranks of a group are
            not those of the dimensions that it stands for.
    """

    device_mesh: DeviceMesh
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    hsdp_outer_dp_shard: bool = False
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        self.use_hybrid_fsdp = self.dp_outer_dim is not None
        self._check_arguments()
        self.fsdp_group = self._group(False, "dp_shard_dim")
        self.outer_fsdp_group = self._group(False, "dp_outer_dim")
        if self.expt_device_mesh is not None:
            self.expt_device_mesh = self._complete_expert_mesh(self.expt_device_mesh)
        self.expt_fsdp_group = self._group(True, "dp_shard_dim")
        self.expt_outer_fsdp_group = self._group(True, "dp_outer_dim")
        self._group(False, "tp_dim")  # checks that it exists
        self.mesh_library = self._build_library()
        if self.use_hybrid_fsdp and self.expt_device_mesh is not None and self.hybrid_fsdp_expt_group is None:
            self.hybrid_fsdp_expt_group = self._make_hybrid_expert_group()
        self._check_groups()

    def get_submesh(
        self, mesh_dim_names: str | Sequence[str | None] | None, is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """Return the sub-mesh of some dimensions.

        Args:
            mesh_dim_names: One dimension or several, outermost first. Without tensor parallelism `index.tp_dim`, which
                is None, stands for a mesh of this rank alone (without a process group).
            is_expert_parallel: Take it from the expert mesh.

        Returns:
            The sub-mesh, the same object every time.

        Raises:
            ConfigurationError: No such sub-mesh was registered.
        """
        wanted = (mesh_dim_names,) if isinstance(mesh_dim_names, str | None) else tuple(mesh_dim_names)
        if wanted == (None,) and self.tp_dim is None:
            return self._alone
        if (*wanted, is_expert_parallel) not in self.mesh_library:
            known = ", ".join(str(key[:-1]) for key in self.mesh_library if key[-1] == is_expert_parallel) or "none"
            which = "expert" if is_expert_parallel else "dense"
            raise ConfigurationError(f"there is no {which} sub-mesh {wanted}; the {which} sub-meshes are {known}.")
        return self.mesh_library[*wanted, is_expert_parallel]  # type: ignore[arg-type]  # names, as was checked

    @functools.cached_property
    def _alone(self) -> DeviceMesh:
        return DeviceMesh(self.device_mesh.device_type, [dist.get_rank()], mesh_dim_names=("tp",), _init_backend=False)

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return the group of all data-parallel ranks: outer and sharding dimension together where both exist."""
        if self.use_hybrid_fsdp:
            return self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group
        return self.get_fsdp_group(is_expert_parallel)

    @property
    def reaching_all(self) -> tuple[dist.ProcessGroup | None, ...]:
        """Groups that together reach every rank of a model: data-parallel ranks, then tensor-parallel ones."""
        return self.get_dp_group(), self._group(False, "tp_dim")

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup | None:
        """Return the group of the sharding dimension, or its second group that only gathers use (None if not given)."""
        if independent_all_gather:
            return self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
        return self.expt_fsdp_group if is_expert_parallel else self.fsdp_group

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return the group of the outer dimension; None without hybrid sharding."""
        return self.expt_outer_fsdp_group if is_expert_parallel else self.outer_fsdp_group

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """Return the mesh that all sub-meshes are slices of; None for experts without one."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Return this rank's shard index in a buffer that is sharded over both dimensions.

        The buffer is cut over the sharding dimension first and each part then over the outer one, so the shards are
        numbered ``sharding rank * outer ranks + outer rank``.

        Args:
            is_expert_parallel: Number the ranks of the expert mesh.

        Returns:
            The number of the shard.

        Raises:
            ConfigurationError: The optimizer is not sharded over an outer dimension, or there is no expert mesh.
        """
        inner, outer = self.get_fsdp_group(is_expert_parallel), self.get_outer_fsdp_group(is_expert_parallel)
        if not self.hsdp_outer_dp_shard or inner is None or outer is None:
            raise ConfigurationError(
                "a logical hybrid rank exists only with dp_outer_dim and hsdp_outer_dp_shard=True (and with "
                "expt_device_mesh for experts); set them."
            )
        return dist.get_rank(inner) * dist.get_world_size(outer) + dist.get_rank(outer)

    def _check_arguments(self) -> None:
        """Check that arguments that belong together are given together."""
        if self.dp_shard_dim is None:
            raise ConfigurationError("dp_shard_dim is missing; name the mesh dimension to shard over.")
        for argument in ("dp_shard_dim", "dp_outer_dim", "tp_dim"):
            if not isinstance(getattr(self, argument), str | None):
                raise ConfigurationError(
                    f"{argument}={getattr(self, argument)!r} is not the name of a mesh dimension; give its name."
                )
        named = [name for name in (self.dp_outer_dim, self.dp_shard_dim, self.tp_dim) if name is not None]
        if len(set(named)) < len(named):
            raise ConfigurationError(
                f"dp_outer_dim={self.dp_outer_dim!r}, dp_shard_dim={self.dp_shard_dim!r} and tp_dim={self.tp_dim!r} "
                "name a dimension twice; give each its own."
            )
        if (self.dp_outer_dim is None) != (self.hybrid_fsdp_group is None):
            given, missing = ("dp_outer_dim", "hybrid_fsdp_group")
            if self.dp_outer_dim is None:
                given, missing = missing, given
            raise ConfigurationError(f"{given} is given without {missing}; give both for hybrid sharding, or neither.")
        has_experts = self.expt_device_mesh is not None
        for name, is_given, needs, has_need in (
            ("hsdp_outer_dp_shard", self.hsdp_outer_dp_shard, "dp_outer_dim", self.use_hybrid_fsdp),
            ("hybrid_fsdp_expt_group", self.hybrid_fsdp_expt_group is not None, "dp_outer_dim", self.use_hybrid_fsdp),
            ("hybrid_fsdp_expt_group", self.hybrid_fsdp_expt_group is not None, "expt_device_mesh", has_experts),
            ("expt_fsdp_group_ag", self.expt_fsdp_group_ag is not None, "expt_device_mesh", has_experts),
        ):
            if is_given and not has_need:
                raise ConfigurationError(f"{name} needs {needs}, which is missing; give both or neither.")

    def _complete_expert_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the expert mesh with every named dimension, unflattened from the one that experts are sharded over."""
        shard, names = self.dp_shard_dim, _dim_names(mesh)
        assert shard is not None
        own = shard if _has_dim(mesh, shard) else self._part_of_shard_dim(names)
        missing = [dim for dim in (self.dp_outer_dim, self.tp_dim) if dim is not None and not _has_dim(mesh, dim)]
        unknown = [
            dim
            for dim in names
            if dim not in (own, shard, self.dp_outer_dim, self.tp_dim)
            # of expert parallelism: "ep", "expt_ep", "expert_parallel"
            and not any(word == "ep" or word.startswith("exp") for word in dim.lower().split("_"))
        ]
        if own is None or (missing and (unknown or own not in names)):
            wanted = repr(shard) if own is None else " and ".join(map(repr, missing))
            raise ConfigurationError(
                f"expt_device_mesh has the dimensions {', '.join(map(repr, names))} but not {wanted}; name its "
                "dimensions as those of device_mesh, and 'ep' the one along which experts differ."
            )
        if own == shard and not missing:
            return mesh
        outer, tp = ([dim] if dim in missing else [] for dim in (self.dp_outer_dim, self.tp_dim))
        parts = (*(1 for _ in outer), mesh.size(names.index(own)), *(1 for _ in tp))
        completed: DeviceMesh = mesh._unflatten(names.index(own), parts, (*outer, shard, *tp))
        return completed

    def _part_of_shard_dim(self, names: tuple[str, ...]) -> str | None:
        """Return the dimension, of those given, that the dense sharding dimension was flattened from, or None."""
        whole = set(dist.get_process_group_ranks(self._group(False, "dp_shard_dim")))
        parts = [
            name
            for name in names
            if name in _dim_names(self.device_mesh)
            and name not in (self.dp_outer_dim, self.tp_dim)
            and whole.issuperset(dist.get_process_group_ranks(self.device_mesh.get_group(name)))
        ]
        return parts[0] if len(parts) == 1 else None

    def _make_hybrid_expert_group(self) -> dist.ProcessGroup:
        """Make the group of the outer and the sharding dimension of experts. Collective over their mesh."""
        if self.expt_outer_fsdp_group is not None and dist.get_world_size(self.expt_outer_fsdp_group) == 1:
            assert self.expt_fsdp_group is not None
            return self.expt_fsdp_group
        outer, shard = self.dp_outer_dim, self.dp_shard_dim
        assert outer is not None
        assert shard is not None
        return self.mesh_library[outer, shard, True]._flatten(f"{outer}_{shard}_of_experts").get_group()

    def _group(self, is_expert: bool, argument: str) -> dist.ProcessGroup | None:
        """Return the group of the dimension that an argument names, if there is one."""
        mesh, name = self.get_root_mesh(is_expert), getattr(self, argument)
        return None if mesh is None or name is None else _group_of(mesh, name, argument)

    def _build_library(self) -> dict[tuple[str | bool, ...], DeviceMesh]:
        """Make the sub-mesh of every combination of dimensions that buffers and DTensors use."""
        outer, shard, tp = self.dp_outer_dim, self.dp_shard_dim, self.tp_dim
        combinations = [(tp,), (outer, shard, tp), (shard, tp), (outer, shard), (outer,), (shard,)]
        library: dict[tuple[str | bool, ...], DeviceMesh] = {}
        for is_expert in (False, True):
            mesh = self.get_root_mesh(is_expert)
            for combination in combinations:
                names = tuple(name for name in combination if name is not None)
                if mesh is not None and len(names) == len(combination):
                    library[*names, is_expert] = _submesh_of(mesh, names)
        return library

    def _check_groups(self) -> None:
        """Raise unless each given group has the ranks of its mesh dimension."""
        shard, outer = self.dp_shard_dim, self.dp_outer_dim
        for argument, group, names, is_expert in (
            ("fsdp_group_ag", self.fsdp_group_ag, (shard,), False),
            ("expt_fsdp_group_ag", self.expt_fsdp_group_ag, (shard,), True),
            ("hybrid_fsdp_group", self.hybrid_fsdp_group, (outer, shard), False),
            ("hybrid_fsdp_expt_group", self.hybrid_fsdp_expt_group, (outer, shard), True),
        ):
            if group is None:
                continue
            if not isinstance(group, dist.ProcessGroup):
                raise ConfigurationError(
                    f"{argument}={group!r} is not a process group; pass one of torch.distributed, such as "
                    "mesh.get_group(name)."
                )
            expected = sorted(self.mesh_library[*names, is_expert].mesh.flatten().tolist())
            if sorted(dist.get_process_group_ranks(group)) != expected:
                mesh = self.get_root_mesh(is_expert)
                raise ConfigurationError(
                    f"{argument} is a group of {dist.get_world_size(group)} ranks that are not those along the mesh "
                    f"dimensions {names}, which are {_ranks_along(mesh, names, expected)}; pass on every rank the "
                    "group of exactly the ranks along them."
                )


def _ranks_along(mesh: DeviceMesh | None, names: tuple[str | None, ...], own: list[int]) -> list[list[int]]:
    """List all groups of ranks along some dimensions, the same on every rank; only `own` where one is flattened."""
    all_names = _dim_names(mesh) if mesh is not None else ()
    if mesh is None or not set(names) <= set(all_names):
        return [own]
    chosen = [all_names.index(name) for name in names if name is not None]
    others = [dim for dim in range(len(all_names)) if dim not in chosen]
    table = mesh.mesh.permute(*others, *chosen).reshape(-1, len(own))
    return [sorted(row) for row in table.tolist()]


def _dim_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's dimensions."""
    if not mesh.mesh_dim_names:
        raise ConfigurationError(
            f"device_mesh={mesh} has no dimension names; build it with init_device_mesh(..., mesh_dim_names=(...))."
        )
    return tuple(mesh.mesh_dim_names)


def _has_dim(mesh: DeviceMesh, name: str) -> bool:
    """Return True if a mesh has a dimension, or a flattened one, of that name."""
    try:
        mesh.get_group(name)
    except KeyError:
        return False
    return True


def _group_of(mesh: DeviceMesh, name: str, argument: str) -> dist.ProcessGroup:
    """Return the process group of one dimension."""
    names = _dim_names(mesh)
    try:
        return mesh.get_group(name)
    except KeyError:
        raise ConfigurationError(
            f"{argument}={name!r} is not a dimension of the device mesh, which has {', '.join(map(repr, names))}; "
            "give one of these or the name of a flattened one."
        ) from None


def _submesh_of(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return the part of a mesh that runs along some dimensions through this rank.

    ``mesh[names]`` finds flattened dimensions in the root mesh only, with a deprecation warning, and only in mesh
    order; ``mesh.get_group(name)`` finds them everywhere (torch 2.11 to 2.13). So sub-meshes with such names are built
    from groups.
    """
    groups = [_group_of(mesh, name, "mesh dimension") for name in names]
    own_names = _dim_names(mesh)
    positions = [own_names.index(name) for name in names if name in own_names]
    if len(positions) == len(names) and positions == sorted(set(positions)):
        return mesh[names]
    if len(names) == 1:
        return DeviceMesh.from_group(groups[0], mesh.device_type, mesh_dim_names=names)
    ranks = _rank_table(mesh, [dist.get_process_group_ranks(group) for group in groups], names)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)


def _rank_table(mesh: DeviceMesh, axes: list[list[int]], names: tuple[str, ...]) -> torch.Tensor:
    """Return the global ranks of the sub-mesh, integers of shape ``[len(axis) for axis in axes]``.

    Each of `axes` lists the global ranks along one dimension through this rank. An entry's place in the flattened mesh
    is this rank's, moved by the steps that lead from this rank to the entry's position on each axis.
    """
    order = mesh.mesh.flatten().tolist()
    members = set(itertools.chain.from_iterable(axes))
    if not members.issubset(order):
        raise ConfigurationError(
            f"the dimensions {names} leave the device mesh {_dim_names(mesh)}; give the mesh that contains them all."
        )
    if len(members) <= sum(len(axis) - 1 for axis in axes):
        raise ConfigurationError(f"the dimensions {names} overlap; give dimensions that have only this rank in common.")
    here = order.index(dist.get_rank())
    places = torch.tensor(here)
    for axis in axes:
        places = places.unsqueeze(-1) + torch.tensor([order.index(rank) - here for rank in axis])
    return mesh.mesh.flatten()[places]


@real_values()
def index_of(
    module: nn.Module,
    device_mesh: DeviceMesh | None,
    dp_shard_dim: str | None,
    *,
    dp_outer_dim: str | None,
    tp_dim: str | None,
    outer_strategy: ShardingStrategy,
    hybrid_fsdp_group: dist.ProcessGroup | None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None,
    expt_device_mesh: DeviceMesh | None,
    fsdp_group_ag: dist.ProcessGroup | None,
    expt_fsdp_group_ag: dist.ProcessGroup | None,
) -> FSDPDistributedIndex:
    """Build the index from arguments of `fully_shard_model`, with a mesh of all ranks where none is given."""
    needs_mesh = {
        "dp_outer_dim": dp_outer_dim,
        "hybrid_fsdp_expt_group": hybrid_fsdp_expt_group,
        "expt_device_mesh": expt_device_mesh,
        "fsdp_group_ag": fsdp_group_ag,
        "expt_fsdp_group_ag": expt_fsdp_group_ag,
    }
    given = [name for name, value in needs_mesh.items() if value is not None]
    if device_mesh is None and given:
        raise ConfigurationError(
            f"{', '.join(given)} cannot take effect without device_mesh, where all ranks lie on one axis; pass the mesh"
        )
    mesh, shard_dim = mesh_and_dim(device_mesh, dp_shard_dim, tp_dim, "dp_shard_dim")
    return FSDPDistributedIndex(
        mesh,
        shard_dim,
        dp_outer_dim,
        tp_dim or tensor_parallel_dim(module, mesh),
        hybrid_fsdp_group=hybrid_fsdp_group,
        hybrid_fsdp_expt_group=hybrid_fsdp_expt_group,
        hsdp_outer_dp_shard=dp_outer_dim is not None and outer_strategy is ShardingStrategy.optim,
        expt_device_mesh=expt_device_mesh,
        fsdp_group_ag=fsdp_group_ag,
        expt_fsdp_group_ag=expt_fsdp_group_ag,
    )


def mesh_and_dim(
    device_mesh: DeviceMesh | None, dim: str | None, tp_dim: str | None, argument: str
) -> tuple[DeviceMesh, str]:
    """Return the mesh, made of all ranks where none is given, and the name of its data-parallel dimension."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            "torch.distributed is not initialised; start the program with torchrun and call "
            "torch.distributed.init_process_group() before sharding"
        )
    if device_mesh is None:
        dim = dim or "fsdp"
        names = (dim,) if tp_dim is None else (dim, tp_dim)
        shape = (dist.get_world_size(), *(1 for _ in names[1:]))
        return init_device_mesh(default_device().type, shape, mesh_dim_names=names), dim
    if dim is None and device_mesh.ndim == 1 and device_mesh.mesh_dim_names:
        dim = device_mesh.mesh_dim_names[0]
    if dim is None:
        known = device_mesh.mesh_dim_names
        cure = f" to shard over, one of {', '.join(known)}" if known else "s (mesh_dim_names=), and the one to use"
        raise ConfigurationError(f"{argument} is missing; name the mesh dimension{cure}")
    return device_mesh, dim


def mesh_device_type(device_mesh: DeviceMesh | None) -> str:
    """Return the device type of a mesh; without one, of the default mesh of all ranks."""
    return default_device().type if device_mesh is None else device_mesh.device_type


def check_mesh(device_mesh: object) -> None:
    """Raise unless the argument is a mesh or None."""
    if not isinstance(device_mesh, DeviceMesh | None):
        raise TypeError(f"device_mesh={device_mesh!r} is not a DeviceMesh or None; pass one")


def ranks_of(device_mesh: object = None, *dims: object) -> Groups:
    """Return the groups of the ranks that shard one model together, from unchecked arguments.

    They are those along the dimensions, of which there may be one only; where no mesh or something else is given, all
    ranks: so a rank whose mesh is wrong is heard by those that have none, or one dimension of all ranks.
    """
    if not isinstance(device_mesh, DeviceMesh):
        return ()
    if device_mesh.ndim == 1:
        return (device_mesh.get_group(),)
    groups: list[dist.ProcessGroup] = []
    for dim in dims:
        with suppress(Exception):  # a dimension may be anything; those that were flattened are in no list
            groups.append(device_mesh.get_group(dim))  # type: ignore[arg-type]
    return tuple(groups) or (None,)


def tensor_parallel_dim(module: nn.Module, mesh: DeviceMesh) -> str | None:
    """Return the mesh dimension over which parameters are DTensors; None for plain ones or another mesh."""
    params = [p for p in module.parameters() if isinstance(p, DTensor) and not hasattr(p, "_megatron_fsdp_model")]
    named = (p.device_mesh.mesh_dim_names for p in params)
    found = {names[0] for names in named if names is not None and len(names) == 1}
    found &= set(mesh.mesh_dim_names or ())
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class FlatAxis:
    """Both axes of a hybrid mesh as one flat axis."""

    axis: Axis  # a rank's place on it is the number of its microbatch
    # for each rank, which of as many equal parts of a flat buffer is its own (see `held_region`)
    shares: tuple[int, ...]


@dataclass(eq=False)
class RankMesh:
    """The data-parallel ranks over which some parameters are sharded; two are equal only if they are one object."""

    axes: tuple[Axis, ...]  # data-parallel, outermost first; the last one is the sharding axis
    names: tuple[str, ...]  # of the axes in the mesh
    group: (
        dist.ProcessGroup | None
    )  # all data-parallel ranks; None for a single one, or before `make_group_of_all_ranks`
    tensor_parallel: DeviceMesh | None  # one-dimensional
    described_mesh: DeviceMesh  # of the sharded parameters' DTensors: the axes and, last, the tensor-parallel dimension
    # For experts, groups of ranks that hold other experts, one per further dimension of their mesh.
    foreign_groups: tuple[dist.ProcessGroup, ...] = field(default=())
    flat: FlatAxis | None = None  # all axes as one, where gradients are added rank by rank
    is_expert: bool = False  # of a model's experts, beside the mesh of its dense parameters

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks, all axes together."""
        return prod(axis.num_ranks for axis in self.axes)

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel group; None for a single rank."""
        mesh = self.tensor_parallel
        return None if mesh is None or mesh.size() == 1 else mesh.get_group()


@real_values()
def make_rank_mesh(
    index: FSDPDistributedIndex,
    traffic: Mapping[str, Traffic],
    is_expert: bool = False,
    sums_locally: bool = False,
    one_by_one: bool = False,
) -> RankMesh:
    """Build the rank mesh of one kind of parameters from an index."""
    assert index.dp_shard_dim is not None
    names = tuple(name for name in (index.dp_outer_dim, index.dp_shard_dim) if name is not None)
    check_rank_order(index.get_submesh(names, is_expert))
    axes = tuple(replace(_axis(index, name, traffic[name], is_expert), sums_locally=sums_locally) for name in names)
    tensor_parallel = index.get_submesh((index.tp_dim,), is_expert) if index.tp_dim is not None else None
    described = names if index.tp_dim is None else (*names, index.tp_dim)
    num_ranks = prod(axis.num_ranks for axis in axes)
    group = index.get_dp_group(is_expert) if num_ranks > 1 else None
    return RankMesh(
        axes=axes,
        names=names,
        group=group,
        tensor_parallel=tensor_parallel,
        described_mesh=index.get_submesh(described, is_expert),
        foreign_groups=_foreign_groups(index) if is_expert else (),
        flat=_flat_axis(index, axes, group) if one_by_one else None,
        is_expert=is_expert,
    )


def check_rank_order(mesh: DeviceMesh) -> None:
    """Raise if the lines of a mesh along a dimension list ranks in different orders."""
    # Groups have their ranks in ascending order. In such a mesh the n-th ranks of parallel groups are no line of it,
    # and ranks with different shards would be reduced together.
    for dim, length in enumerate(mesh.shape):
        order = mesh.mesh.argsort(dim).movedim(dim, 0).reshape(length, -1)
        if not order.eq(order[:, :1]).all():
            raise ConfigurationError(
                f"the mesh lists ranks as {mesh.mesh.tolist()}, with different orders along dimension {dim}; list them "
                "in the same order in all lines of a dimension, such as ascending"
            )


@real_values()
def rank_mesh_of(mesh: DeviceMesh, traffic: dict[str, Traffic], tensor_parallel: DeviceMesh | None = None) -> RankMesh:
    """Build the rank mesh of a data-parallel mesh of one dimension, or of two: outer, then sharding. No communication.

    Args:
        mesh: The data-parallel mesh.
        traffic: The counters of each dimension's name; added to.
        tensor_parallel: The one-dimensional mesh over which parameters are DTensors already, of the same root mesh.
    """
    check_rank_order(mesh)
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    groups = [mesh.get_group(dim) if mesh.size(dim) > 1 else None for dim in range(mesh.ndim)]
    axes = tuple(
        Axis(group, 0 if group is None else dist.get_rank(group), mesh.size(dim), traffic.setdefault(name, Traffic()))
        for dim, (name, group) in enumerate(zip(names, groups, strict=True))
    )
    return RankMesh(
        axes=axes,
        names=tuple(names),
        group=groups[0] if mesh.ndim == 1 else None,
        tensor_parallel=tensor_parallel,
        described_mesh=mesh if tensor_parallel is None else _beside(mesh, tensor_parallel),
    )


def _beside(mesh: DeviceMesh, tensor_parallel: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the data-parallel dimensions and, last, the tensor-parallel one."""
    names = (*(mesh.mesh_dim_names or ()), *(tensor_parallel.mesh_dim_names or ()))
    root = mesh._get_root_mesh()
    # Not the root of the other one: torch's caches hand out equal meshes, of other roots.
    if not set(names) <= set(_dim_names(root)) or root[names[-1]] != tensor_parallel:
        raise ConfigurationError(
            f"parameters are DTensors over {tensor_parallel}, which has no named root mesh in common with {mesh}; take "
            "both from one mesh: init_device_mesh(..., mesh_dim_names=(...)), then mesh[name]"
        )
    return _submesh_of(root, names)


def make_group_of_all_ranks(rank_mesh: RankMesh) -> None:
    """Make the group of all ranks of a two-dimensional mesh, which is destroyed with it. Collective over its ranks."""
    if rank_mesh.group is None and rank_mesh.num_ranks > 1:
        rank_mesh.group = group_over(rank_mesh.described_mesh, rank_mesh)


def groups_reaching_all(meshes: Sequence[RankMesh]) -> tuple[dist.ProcessGroup | None, ...]:
    """Return the groups of rank meshes that together reach all their ranks: none lies within another."""
    found: list[dist.ProcessGroup] = []
    for group in sorted((mesh.group for mesh in meshes if mesh.group is not None), key=dist.get_world_size)[::-1]:
        ranks = set(dist.get_process_group_ranks(group))
        if not any(ranks.issubset(dist.get_process_group_ranks(other)) for other in found):
            found.append(group)
    return tuple(found) or (None,)


def _flat_axis(index: FSDPDistributedIndex, axes: Sequence[Axis], group: dist.ProcessGroup | None) -> FlatAxis | None:
    """Make the flat axis of a hybrid mesh; None without an outer axis of several ranks."""
    if group is None or len(axes) == 1 or axes[0].num_ranks == 1:
        return None
    assert index.dp_outer_dim is not None
    assert index.dp_shard_dim is not None
    table = index.get_submesh((index.dp_outer_dim, index.dp_shard_dim)).mesh.tolist()
    columns = list(zip(*table, strict=True))
    place = {  # the ranks of an axis are in the order of its group, which is ascending
        rank: sorted(row).index(rank) * len(table) + sorted(column).index(rank)
        for row in table
        for rank, column in zip(row, columns, strict=True)
    }
    ranks = dist.get_process_group_ranks(group)
    axis = Axis(group, dist.get_rank(group), len(ranks), axes[-1].traffic, sums_locally=True)
    return FlatAxis(axis, tuple(place[rank] for rank in ranks))


def _axis(index: FSDPDistributedIndex, name: str, traffic: Traffic, is_expert: bool) -> Axis:
    mesh = index.get_submesh((name,), is_expert)
    num_ranks = mesh.size()
    group = mesh.get_group() if num_ranks > 1 else None
    gather_group = None
    if name == index.dp_shard_dim and group is not None:
        gather_group = index.get_fsdp_group(is_expert, independent_all_gather=True)
    # Not the coordinate on the mesh: a mesh may list ranks out of order, and its group has them in order.
    rank = dist.get_rank(group) if group is not None else 0
    return Axis(group, rank, num_ranks, traffic, gather_group)


def _foreign_groups(index: FSDPDistributedIndex) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups along the expert mesh's other dimensions, neither data nor tensor parallel."""
    mesh = index.expt_device_mesh
    assert mesh is not None
    here = dist.get_rank()
    own: set[int] = set()
    for group in (index.expt_outer_fsdp_group, index.expt_fsdp_group):
        own.update(dist.get_process_group_ranks(group) if group is not None else ())
    if index.tp_dim is not None:
        own.update(index.get_submesh((index.tp_dim,), True).mesh.flatten().tolist())
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]
    return tuple(
        group
        for group in groups
        if dist.get_world_size(group) > 1 and not (set(dist.get_process_group_ranks(group)) - {here}) & own
    )
