"""Placements of a unit's buffers in torch's own classes, and `Flat`, a name for `Shard(0)` of flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError


class Flat(Shard):
    """A flat buffer cut into equal consecutive shards, which hold whole rows of its tensors; equals `Shard(0)`."""

    def __init__(self) -> None:
        super().__init__(0)


RowAtomic = Flat
"""The name announced for `Flat`."""


@dataclass(frozen=True)
class Placements:
    """One placement per data-parallel axis, outermost first, for each of a unit's persistent buffers.

    Args:
        dp_axes: The mesh's axes in their order, by name or number.
        parameter: Of the compute weights.
        gradient: Of the main gradients between backwards.
        optimizer: Of the main weights, and of main gradients once they are reduced.

    Raises:
        ConfigurationError: The lists differ in length, or shards are not a suffix of the axes (a ValueError).
        NotSupportedYetError: A `Shard` of another dimension than 0, or a `Partial` that is neither sum nor avg (a
            NotImplementedError).
        TypeError: A placement of another type.
    """

    dp_axes: Sequence[int | str]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dp_axes", tuple(self.dp_axes))
        for name in ("parameter", "gradient", "optimizer"):
            placed = check_placements(getattr(self, name), len(self.dp_axes), f"Placements.{name}", "dp_axes")
            object.__setattr__(self, name, placed)

    def check_axes(self, mesh: DeviceMesh) -> None:
        """Check that `dp_axes` are the axes of a mesh, each once and in order.

        Raises:
            ConfigurationError: An axis is unknown, named twice or out of order (a ValueError).
            NotSupportedYetError: The mesh has more axes (a NotImplementedError).
        """
        found = [axis_index(mesh, axis) for axis in self.dp_axes]
        if found != sorted(set(found)):
            raise ConfigurationError(
                f"dp_axes={self.dp_axes!r} are axes {found} of the mesh; name each once, in the order of the mesh"
            )
        if len(found) < mesh.ndim:
            raise NotSupportedYetError(
                f"dp_axes={self.dp_axes!r} leave out axes of {mesh}; pass the submesh of the data-parallel axes"
            )


def check_placements(
    placements: Iterable[Placement], count: int, name: str = "placements", axes: str = "the mesh"
) -> tuple[Placement, ...]:
    """Check one placement per axis; return them with `Flat` for `Shard(0)`."""
    placed = tuple(_check(placement, name) for placement in placements)
    if len(placed) != count:
        raise ConfigurationError(f"{name} {placed} are {len(placed)}, but {axes} has {count} axes; give one for each")
    first = next((i for i, placement in enumerate(placed) if isinstance(placement, Flat)), count)
    if not all(isinstance(placement, Flat) for placement in placed[first:]):
        raise ConfigurationError(
            f"{name} {placed}: Flat placements must be a suffix of the axes, outermost axis first; shard the inner "
            "axes before the outer ones"
        )
    return placed


def _check(placement: object, name: str) -> Placement:
    if isinstance(placement, Replicate | Flat):
        return placement
    if type(placement) is Shard:
        if placement.dim == 0:
            return Flat()
        raise NotSupportedYetError(f"{name}: {placement} cuts dim {placement.dim}, but flat buffers Shard(0) only")
    if type(placement) is not Partial:
        raise TypeError(f"{name}: {placement!r} is no placement of a flat buffer; give Replicate, Partial or Shard(0)")
    if placement.reduce_op not in ("avg", "sum"):
        raise NotSupportedYetError(f'{name}: {placement!r} is not supported; give Partial("avg") or Partial("sum")')
    return placement


def axis_index(mesh: DeviceMesh, axis: int | str) -> int:
    """Return the number of a mesh axis, given by name or by a number that may be negative."""
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    known = "".join(f", {name!r}" for name in names)
    raise ConfigurationError(
        f"{axis!r} is no axis of {mesh}; give one of {', '.join(map(str, range(mesh.ndim)))}{known}"
    )
