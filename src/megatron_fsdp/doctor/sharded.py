"""The sharded side: trains on these ranks, records whole tensors, and saves and loads a checkpoint."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp.checkpoint import Checkpointer
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.doctor.report import BUFFER, INITIAL, LOADED, RESUMED, WEIGHT
from megatron_fsdp.doctor.task import Pair, ShardFn, Task, digest_of
from megatron_fsdp.doctor.training import Observation, Place, Trainee, Values
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fully_shard import fully_shard

_OTHER_SEED = 7919  # weights that loading has to replace


def shard_with(strategy: int | str, device: torch.device) -> ShardFn:
    """Return a function that calls `fully_shard` over all ranks with a strategy and automatic units."""

    def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        return fully_shard(model, optimizer, device_mesh=mesh, dp_shard_dim="dp_shard", zero_dp_strategy=strategy)

    return shard


def run_sharded(task: Task, shard: ShardFn, known: tuple[str, ...], device: torch.device) -> Observation:
    """Train on these ranks and record what is compared, the same on every rank; collective.

    `known` are the names of parameters and buffers in the user's own model.
    """
    trainee = Trainee(*_shard(shard, task.build(device)), task, known)
    values = dict[Place, Values]({(INITIAL, 0): trainee.parameters()})
    torch.manual_seed(task.seed)
    for step in range(1, task.steps + 1):
        values |= _step(task, trainee, step, device)
    values[BUFFER, task.steps] = trainee.buffers()
    trip = _round_trip(task, trainee, shard, known, device) if task.checkpoint else {}
    return Observation(values, trip, _disagreements(values))


def _shard(shard: ShardFn, pair: Pair) -> Pair:
    """Call a sharding function.

    Raises:
        ConfigurationError: It returns something else than a model and an optimizer.
    """
    given: Any = shard(*pair)
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if not is_pair or not isinstance(given[0], nn.Module) or not hasattr(given[1], "step"):
        kinds = ", ".join(type(each).__name__ for each in given) if isinstance(given, tuple | list) else ""
        told = f"({kinds})" if kinds else type(given).__name__
        raise ConfigurationError(
            f"shard_fn gave {told}; it has to give (model, optimizer): return the optimizer too, as it is or new"
        )
    return given[0], given[1]


def _step(task: Task, trainee: Trainee, step: int, device: torch.device) -> dict[Place, Values]:
    """Make one step with this rank's samples."""
    num_ranks = dist.get_world_size()
    microbatches = task.microbatches_of(step, num_ranks, device)

    def add_up(loss: float) -> float:
        return sum(gather_objects(loss)) * task.share_of_rank(num_ranks)

    return trainee.step(step, [task.parts_of_rank(microbatches, dist.get_rank(), num_ranks)], add_up)


def _round_trip(
    task: Task, trainee: Trainee, shard: ShardFn, known: tuple[str, ...], device: torch.device
) -> dict[Place, tuple[Values, Values]]:
    """Save, load into a fresh model with other weights, and make one more step with both."""
    made = tempfile.mkdtemp(prefix="mfsdp-doctor-", dir=task.checkpoint_dir) if dist.get_rank() == 0 else ""
    folder = Path(gather_objects(made)[0])
    try:
        checkpointer = Checkpointer(folder)
        checkpointer.save(task.steps, trainee.model, trainee.optimizer)
        saved = _everything(trainee)
        fresh = Trainee(*_shard(shard, task.build(device, task.seed + _OTHER_SEED)), task, known)
        checkpointer.load(fresh.model, fresh.optimizer)
        loaded, later = _everything(fresh), task.steps + 1
        went_on, resumed = (_step(task, each, later, device)[WEIGHT, later] for each in (trainee, fresh))
        return {(LOADED, 0): (saved, loaded), (RESUMED, later): (went_on, resumed)}
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)


def _everything(trainee: Trainee) -> Values:
    counters, state = trainee.optimizer_state()
    return {**trainee.parameters(), **state, **{f"{name}: step": count for name, count in counters.items()}}


def _disagreements(values: Mapping[Place, Values]) -> dict[Place, dict[str, tuple[Tensor | None, ...]]]:
    """Return the values of each rank that differ between ranks, in the first place where any do.

    Takes one collective, and one more if there is such a place.
    """
    mine = {(place, name): digest_of(value) for place, here in values.items() for name, value in here.items()}
    everyone = gather_objects(mine)
    keys = dict.fromkeys(key for of_rank in everyone for key in of_rank)
    different = [key for key in keys if len({of_rank.get(key) for of_rank in everyone}) > 1]
    if not different:
        return {}
    place = different[0][0]
    names = [name for at, name in different if at == place]
    of_ranks = gather_objects({name: values[place].get(name) for name in names})
    return {place: {name: tuple(of_rank[name] for of_rank in of_ranks) for name in names}}
