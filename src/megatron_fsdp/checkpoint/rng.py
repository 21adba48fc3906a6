"""Random states of every rank in a checkpoint, by logical rank.

A logical rank is a rank's place in the model's parallelism: its index along pipeline parallelism, tensor parallelism
and data parallelism (all other mesh dimensions, flattened). With as many of each as when it was saved, each logical
rank gets back its own streams, wherever it runs now. With other numbers the streams fit no rank: every rank is then
seeded from its logical rank and a digest of all saved streams, so that ranks differ, nothing repeats, and the same
checkpoint on the same new ranks gives the same numbers again.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.naming import RNG, device_of, place_of
from megatron_fsdp.comm.agreement import rank_of, world_size_of
from megatron_fsdp.errors import CheckpointError


@dataclass(frozen=True)
class LogicalRank:
    """A rank's place along tensor, data (all the rest) and pipeline parallelism, and the size of each."""

    tensor: int
    tensor_size: int
    data: int
    data_size: int
    stage: int = 0
    stages: int = 1

    @property
    def key(self) -> str:
        """The name in a checkpoint: stage, tensor index, data index."""
        return f"({self.stage}, {self.tensor}).{self.data}"

    @property
    def topology(self) -> list[int]:
        """The size along each, as a checkpoint stores it; stages only if there is a pipeline."""
        sizes = [self.tensor_size, self.data_size]
        return sizes if self.stages == 1 else [*sizes, self.stages]


def logical_rank_of(model: nn.Module, group: dist.ProcessGroup | None = None) -> LogicalRank:
    """Return this rank's place; in a pipeline, whole pipelines are counted as data-parallel ranks."""
    rank, size = rank_of(group), world_size_of(group)
    pipeline = place_of(model)
    if pipeline.size > 1:
        return LogicalRank(0, 1, pipeline.number, size // pipeline.size, pipeline.index, pipeline.size)
    index = getattr(model, "dist_index", None)
    mesh, tp_dim = getattr(index, "device_mesh", None), getattr(index, "tp_dim", None)
    coordinate = mesh.get_coordinate() if mesh is not None and tp_dim is not None else None
    if mesh is None or tp_dim is None or coordinate is None or mesh.size() != size:
        return LogicalRank(0, 1, rank, size)
    return place_in(mesh.mesh_dim_names or (), mesh.shape, coordinate, tp_dim)


def place_in(names: Sequence[str], shape: Sequence[int], coordinate: Sequence[int], tp_dim: str) -> LogicalRank:
    """Return the place of a mesh coordinate; all dimensions except `tp_dim` are flattened, the last fastest."""
    data, data_size = 0, 1
    for name, place, length in zip(names, coordinate, shape, strict=True):
        if name != tp_dim:
            data, data_size = data * length + place, data_size * length
    dim = list(names).index(tp_dim)
    return LogicalRank(coordinate[dim], shape[dim], data, data_size)


def collect(model: nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return this rank's random states, as the section of a checkpoint."""
    place, device = logical_rank_of(model, group), device_of(model)
    states: dict[str, Any] = {
        "random_rng_state": random.getstate(),
        "torch_rng_state": torch.get_rng_state(),
        "np_rng_state": np.random.get_state(),
    }
    if device.type != "cpu":
        states["accelerator_rng_state"] = torch.get_device_module(device.type).get_rng_state(device)
    outer, inner = place.key.split(".")
    return {RNG: {outer: {inner: {"states": [states]}}, "topology": place.topology}}


def prepare(
    folder: CheckpointFolder, model: nn.Module, group: dist.ProcessGroup | None = None
) -> tuple[Callable[[], None], str]:
    """Test the states of a checkpoint on separate generators, so that damage changes nothing.

    Returns a function that sets this rank's generators, and its description for the report.
    """
    keys = [key for key in folder.objects if key.startswith(f"{RNG}.") and key.endswith(".states")]
    if f"{RNG}.topology" not in folder.objects or not keys:
        return lambda: None, "none that this library has saved, so the streams go on as they are"
    place, device = logical_rank_of(model, group), device_of(model)
    topology, own = folder.read_object(f"{RNG}.topology"), f"{RNG}.{place.key}.states"
    if topology == place.topology:
        states = _states_of(folder.read_object(own) if own in keys else None, place.key)
        _set(states, device, on_trial=True)
        lacks = device.type != "cpu" and "accelerator_rng_state" not in states
        added = f", but for those of {device.type}, which were not saved and go on as they are" if lacks else ""
        return partial(_set, states, device, on_trial=False), f"restored for every logical rank{added}"
    has_stages = place.stages > 1 or (isinstance(topology, list) and len(topology) > 2)
    description = (
        f"saved with (tensor, data{', pipeline' if has_stages else ''}) ranks {topology}, now "
        f"{tuple(place.topology)}, so every rank was seeded anew from the saved states and its logical rank"
    )
    # Of all saved torch states and this rank's place, 63 bits.
    stage = "" if place.stages == 1 else f" {place.stage}/{place.stages}"
    digest = hashlib.sha256(f"{place.tensor}/{place.tensor_size} {place.data}/{place.data_size}{stage}".encode())
    for key in sorted(keys):
        digest.update(_states_of(folder.read_object(key), key)["torch_rng_state"].numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:8], "big") >> 1

    def seed_all() -> None:
        random.seed(seed)
        torch.manual_seed(seed)  # accelerators too
        np.random.seed(seed % 2**32)

    return seed_all, description


def _states_of(found: Any, key: str) -> Mapping[str, Any]:
    states = found[0] if isinstance(found, list) and found else None
    if not isinstance(states, Mapping) or not isinstance(states.get("torch_rng_state"), torch.Tensor):
        raise CheckpointError(
            f"the random states of logical rank {key} are missing or damaged; load with with_rng=False"
        )
    return states


def _set(states: Mapping[str, Any], device: torch.device, *, on_trial: bool) -> None:
    """Set this rank's generators, or separate ones on trial."""
    setters: dict[str, Callable[[Any], object]] = {
        "torch_rng_state": torch.Generator().set_state if on_trial else torch.set_rng_state,
        "random_rng_state": random.Random().setstate if on_trial else random.setstate,
    }
    if "np_rng_state" in states:
        setters["np_rng_state"] = np.random.RandomState().set_state if on_trial else np.random.set_state
    if device.type != "cpu" and "accelerator_rng_state" in states:
        of_all = partial(torch.get_device_module(device.type).set_rng_state, device=device)
        setters["accelerator_rng_state"] = torch.Generator(device).set_state if on_trial else of_all
    try:
        for name, set_state in setters.items():
            set_state(states[name])
    except (RuntimeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(f"the saved random states cannot be set ({error}); load with with_rng=False") from error
