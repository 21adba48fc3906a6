"""The sharded side: train on these ranks, note whole tensors, and take a checkpoint there and back."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp.checkpoint import Checkpointer
from megatron_fsdp.checkpoint.agree import gather_objects
from megatron_fsdp.doctor.difference import BUFFER, COUNTER, GRADIENT, INITIAL, NORM, STATE, WEIGHT
from megatron_fsdp.doctor.digest import digest_of
from megatron_fsdp.doctor.observation import Disagreement, Observation, RoundTrip, StepRecord, Values
from megatron_fsdp.doctor.recording import Trainee
from megatron_fsdp.doctor.task import Pair, ShardFn, Task
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fully_shard import fully_shard

_OTHER_SEED = 7919  # weights that loading has to replace


def shard_with(strategy: int | str, device: torch.device) -> ShardFn:
    """`fully_shard` over all ranks with a strategy and automatic units."""

    def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        return fully_shard(model, optimizer, device_mesh=mesh, dp_shard_dim="dp_shard", zero_dp_strategy=strategy)

    return shard


def run_sharded(task: Task, shard: ShardFn, known: tuple[str, ...], device: torch.device) -> Observation:
    """Train on these ranks; collective.

    Args:
        task: What to train.
        shard: How to shard it.
        known: Names of parameters and buffers in the user's own model.
        device: Of this rank.

    Returns:
        The same on every rank.
    """
    trainee = Trainee(*_shard(shard, task.build(device)), task, known)
    initial, owners = trainee.parameters(), trainee.owners()
    torch.manual_seed(task.seed)
    steps = tuple(_step(task, trainee, number, device) for number in range(1, task.steps + 1))
    buffers = trainee.buffers()
    trip = _round_trip(task, trainee, shard, known, device) if task.checkpoint else None
    observation = Observation(initial, steps, buffers, trip)
    return replace(observation, disagreements=_disagreements(observation), owners=owners)


def _shard(shard: ShardFn, pair: Pair) -> Pair:
    """Call a sharding function.

    Raises:
        ConfigurationError: It gives something else than a model and an optimizer.
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


def _step(task: Task, trainee: Trainee, number: int, device: torch.device) -> StepRecord:
    num_ranks = dist.get_world_size()
    microbatches = task.microbatches_of(number, num_ranks, device)

    def add_up(loss: float) -> tuple[float, tuple[float, ...]]:
        losses = tuple(gather_objects(loss))
        return sum(losses) * task.share_of_rank(num_ranks), losses

    return trainee.step([task.parts_of_rank(microbatches, dist.get_rank(), num_ranks)], add_up)


def _round_trip(
    task: Task, trainee: Trainee, shard: ShardFn, known: tuple[str, ...], device: torch.device
) -> RoundTrip:
    """Save, load into a fresh model with other weights, and let both make one more step."""
    made = tempfile.mkdtemp(prefix="mfsdp-doctor-", dir=task.checkpoint_dir) if dist.get_rank() == 0 else None
    folder = Path(gather_objects(made)[0])
    try:
        checkpointer = Checkpointer(folder)
        checkpointer.save(task.steps, trainee.model, trainee.optimizer)
        saved = _everything(trainee)
        fresh = Trainee(*_shard(shard, task.build(device, task.seed + _OTHER_SEED)), task, known)
        checkpointer.load(fresh.model, fresh.optimizer)
        loaded = _everything(fresh)
        went_on = _step(task, trainee, task.steps + 1, device).parameters
        resumed = _step(task, fresh, task.steps + 1, device).parameters
        return RoundTrip(saved, loaded, went_on, resumed)
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _everything(trainee: Trainee) -> Values:
    counters, state = trainee.optimizer_state()
    counts = {f"{name}: step": _number(count) for name, count in counters.items()}
    return {**trainee.parameters(), **state, **counts}


def _disagreements(observation: Observation) -> tuple[Disagreement, ...]:
    """What ranks hold different values of, in the first place where they do; one collective, and one more if so."""
    mine = {(place, name): digest_of(value) for place, values in _places(observation) for name, value in values.items()}
    everyone = gather_objects(mine)
    keys = dict.fromkeys(key for of_rank in everyone for key in of_rank)
    different = [key for key in keys if len({of_rank.get(key) for of_rank in everyone}) > 1]
    if not different:
        return ()
    place = different[0][0]
    here = dict(_places(observation)).get(place, {})
    names = [name for at, name in different if at == place]
    values = gather_objects({name: here.get(name) for name in names})
    return tuple(Disagreement(place, name, tuple(of_rank[name] for of_rank in values)) for name in names)


def _places(observation: Observation) -> Iterator[tuple[tuple[str, int], Mapping[str, Tensor | None]]]:
    yield (INITIAL, 0), observation.initial
    for number, record in enumerate(observation.steps, start=1):
        yield (GRADIENT, number), record.gradients
        yield (NORM, number), {"": None if record.norm is None else _number(record.norm)}
        yield (COUNTER, number), {name: _number(count) for name, count in record.counters.items()}
        yield (WEIGHT, number), record.parameters
        yield (STATE, number), record.state
    yield (BUFFER, len(observation.steps)), observation.buffers


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
