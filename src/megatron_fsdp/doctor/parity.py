"""`check_parity`: the user's model, sharded, against one process."""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp.checkpoint import Checkpointer
from megatron_fsdp.comm.agreement import Problem, all_agree, ask, first_problem, gather_objects
from megatron_fsdp.config.ddp_config import resolve_strategy
from megatron_fsdp.doctor.compare import compare
from megatron_fsdp.doctor.local_ranks import run_on_ranks
from megatron_fsdp.doctor.reference import run_reference
from megatron_fsdp.doctor.report import BUFFER, INITIAL, LOADED, RESUMED, WEIGHT, ParityReport, RunReport
from megatron_fsdp.doctor.training import (
    LossFn,
    ModelFn,
    Observation,
    OptimizerFn,
    Pair,
    Place,
    ShardFn,
    Task,
    Trainee,
    Values,
    digest_of,
    digest_of_batch,
    require_count,
    slices_of_ranks,
)
from megatron_fsdp.errors import ConfigurationError, RankError, words_of
from megatron_fsdp.fully_shard import fully_shard

Result = TypeVar("Result")


def check_parity(
    model_fn: ModelFn | str,
    batch: Any,
    *,
    loss_fn: LossFn | str | None = None,
    optimizer_fn: OptimizerFn | str = "adamw",
    shard_fn: ShardFn | str | None = None,
    ranks: int = 3,
    strategies: tuple[int | str, ...] = (0, 1, 2, 3),
    steps: int = 3,
    microbatches: int = 1,
    max_norm: float | None = 1.0,
    reduction: Literal["mean", "sum"] = "mean",
    seed: int = 0,
    tolerance: float | None = None,
    checkpoint: bool = True,
    checkpoint_dir: str | None = None,
    device: str | None = None,
    timeout_s: float = 600.0,
) -> ParityReport:
    """Run a model sharded and in one process, and compare everything that training makes of it.

    Loss, every gradient, the gradient norm, optimizer steps and a checkpoint round trip are compared in the order of
    causes. Where torch.distributed is initialised, its ranks are used (then every rank calls this, and all get the same
    report); else ranks are started on this machine, and functions have to be importable there. One process trains on
    the whole batch; rank r of N on slice r of N equal ones. The model and some ten copies of its weights have to fit
    into the memory of one process.

    Args:
        model_fn: Builds the model; it is called several times, each after the same `torch.manual_seed`. This and the
            other functions may be import paths, "package.module:name".
        batch: A tensor, or tensors in a dict, tuple or list, whose first dimension is samples; or a function of a seed
            (one per step) or of nothing that makes one.
        loss_fn: (model, samples) -> scalar loss; None: `model(**samples).loss` of a dict, `model(*samples)` of a tuple,
            `model(samples)` of a tensor.
        optimizer_fn: (model) -> optimizer; or "adamw" or "sgd", of learning rate 1e-3.
        shard_fn: (model, optimizer) -> (model, optimizer), on every rank: any way to shard; None: `fully_shard`.
        ranks: How many ranks to start. With two, a factor of 2 may be their number, or something that is doubled.
        strategies: For `fully_shard`, one run each: 0 to 3, or their names. Ignored with `shard_fn`.
        steps: Optimizer steps to compare.
        microbatches: Into how many microbatches a batch is cut; gradients add up over them.
        max_norm: Gradients are clipped to this norm, by the model's own `clip_grad_norm_` if it has one, else by
            torch's; None: not clipped.
        reduction: "mean": ranks' losses are averaged; "sum": they are summed, for shardings that sum gradients.
        seed: Of weights and batches.
        tolerance: Allowed difference, as a part of an element plus the same part of the tensor's largest one; None:
            by the coarsest dtype of the parameters (float32: 1e-5). Four times as much after every update.
        checkpoint: Whether to save, load into a fresh model and make one more step.
        checkpoint_dir: A folder that all ranks share; None: a temporary one of this machine.
        device: "cpu" or an accelerator, such as "cuda"; None: that of the process group; without one, the accelerator
            where there is one for every rank, else the CPU.
        timeout_s: Seconds that ranks started here may take.

    Returns:
        The report: `.passed`, `.judged`, `.differences`, `.summary()`, `.to_dict()`.

    Raises:
        ConfigurationError: An argument cannot be honoured: a batch that does not divide, a loss that is no scalar, a
            function that other processes cannot import.
        RankError: A rank failed, or took too long; says which one and what it met. All ranks are ended.
    """
    task = Task(
        model_fn=model_fn,
        batch=batch,
        loss_fn=loss_fn,
        optimizer_fn=optimizer_fn,
        shard_fn=shard_fn,
        strategies=strategies,
        steps=steps,
        microbatches=microbatches,
        max_norm=max_norm,
        reduction=reduction,
        seed=seed,
        tolerance=tolerance,
        checkpoint=checkpoint,
        checkpoint_dir=checkpoint_dir,
    )
    same = {name: repr(value) for name, value in vars(task).items() if not name.endswith(("_fn", "batch"))}
    with all_agree("check_parity", facts={**same, "device": repr(device)}):
        _require_possible(task)
    report: ParityReport = run_on_ranks(_check, task, ranks, device, timeout_s)
    return report


def _check(task: Task, device: torch.device) -> ParityReport:
    """Run the check on the existing ranks; collective, with the same report on all.

    Rank 0 also runs the one process, while the others wait.
    """
    num_ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    task = _together(task.with_batches, "the batches could not be made")  # which must be the same on every rank
    ask([(dist.group.WORLD, [digest_of_batch(batch) for batch in task.made])], _same_batches)
    right = _together(
        lambda: run_reference(task, num_ranks, device) if is_first else None,
        "the model could not be trained in one process, without any sharding",
    )
    can_compare = gather_objects(right is not None and bool(right.values))[0]
    runs = []
    for label, shard in _shardings(task, device) if can_compare else []:
        observation = _ShardedRun(task, shard, device).observe()
        if right is not None:
            found = compare(right, observation, repeats=device.type == "cpu")
            runs.append(RunReport(label, tuple(found), () if task.checkpoint else ("checkpoint",)))
    report = None
    if right is not None:
        findings = () if right.finding is None else (right.finding,)
        report = ParityReport(num_ranks, task.steps, right.tolerance.part, findings, tuple(runs), right.notes)
    return cast(ParityReport, gather_objects(report)[0])


def _together(act: Callable[[], Result], failing: str) -> Result:
    """Call `act`, and raise one rank's error on all ranks; collective."""
    result: Result | None = None
    failure: Exception | None = None
    problem: Problem | None = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - the other ranks must raise it too
        failure, problem = error, (RankError, f"{failing}:\n{''.join(traceback.format_exception(error)).strip()}")
        if isinstance(error, ConfigurationError):
            problem = ConfigurationError, words_of(error)
    ask([(dist.group.WORLD, problem)], first_problem, failure)
    return cast(Result, result)


def _same_batches(digests: Sequence[object]) -> Problem | None:
    other = [str(rank) for rank, own in enumerate(digests) if own != digests[0]]
    text = f"batch gives rank(s) {', '.join(other)} other samples than rank 0; it has to make the batch of all ranks "
    return (ConfigurationError, f"{text}together, the same on every rank") if other else None


def _shardings(task: Task, device: torch.device) -> list[tuple[str, ShardFn]]:
    own = task.sharding()
    if own is not None:
        return [(str(getattr(own, "__name__", "shard_fn")), own)]
    return [
        (f"strategy {place.value} ({place.name})", _shard_with(place.name, device))
        for place in map(resolve_strategy, task.strategies)
    ]


def _require_possible(task: Task) -> None:
    """Reject impossible arguments before ranks are started."""
    require_count("steps", task.steps)
    require_count("microbatches", task.microbatches)
    if task.reduction not in ("mean", "sum"):
        raise ConfigurationError(f'reduction is {task.reduction!r}; give "mean" or "sum"')
    if task.tolerance is not None and not 0 <= task.tolerance < 1:
        raise ConfigurationError(f"tolerance is {task.tolerance!r}; give a part from 0 to 1, such as 1e-5, or None")
    if not task.strategies and task.shard_fn is None:
        raise ConfigurationError("strategies is empty; give one of 0 to 3 at least, or a shard_fn")
    for strategy in task.strategies:
        resolve_strategy(strategy)


# ---- the sharded side: trains, records whole tensors, saves and loads a checkpoint ----------------------------------

_OTHER_SEED = 7919  # weights that loading has to replace


def _shard_with(strategy: int | str, device: torch.device) -> ShardFn:
    """Return a function that shards with `fully_shard` over all ranks, with a strategy and automatic units."""

    def shard(model: nn.Module, optimizer: torch.optim.Optimizer) -> Pair:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        return fully_shard(model, optimizer, device_mesh=mesh, dp_shard_dim="dp_shard", zero_dp_strategy=strategy)

    return shard


class _ShardedRun:
    """A training run on these ranks whose record is the same on every rank; every method is collective."""

    def __init__(self, task: Task, shard: ShardFn, device: torch.device) -> None:
        self.task, self.shard, self.device = task, shard, device

    def observe(self) -> Observation:
        """Train, then save and load a checkpoint."""
        trainee = self._trainee(self.task.seed)
        values = dict[Place, Values]({(INITIAL, 0): trainee.parameters()})
        torch.manual_seed(self.task.seed)
        for step in range(1, self.task.steps + 1):
            values |= self._step(trainee, step)
        values[BUFFER, self.task.steps] = trainee.buffers()
        trip = self._round_trip(trainee) if self.task.checkpoint else {}
        return Observation(values, trip, _disagreements(values))

    def _trainee(self, seed: int) -> Trainee:
        model, optimizer = self.task.build(self.device, seed)
        own_names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        given: Any = self.shard(model, optimizer)
        is_pair = isinstance(given, tuple | list) and len(given) == 2
        if not is_pair or not isinstance(given[0], nn.Module) or not hasattr(given[1], "step"):
            kinds = ", ".join(type(each).__name__ for each in given) if isinstance(given, tuple | list) else ""
            shown = f"({kinds})" if kinds else type(given).__name__
            raise ConfigurationError(
                f"shard_fn gave {shown}; it has to give (model, optimizer): return the optimizer too, as it is or new"
            )
        return Trainee(given[0], given[1], self.task, own_names)

    def _step(self, trainee: Trainee, step: int) -> dict[Place, Values]:
        """Make one step with this rank's samples."""
        num_ranks = dist.get_world_size()
        of_ranks = slices_of_ranks(self.task.microbatches_of(step, num_ranks, self.device), num_ranks)

        def add_up(loss: float) -> float:
            return sum(gather_objects(loss)) * self.task.share_of_rank(num_ranks)

        return trainee.step(step, [of_ranks[dist.get_rank()]], add_up=add_up)

    def _round_trip(self, trainee: Trainee) -> dict[Place, tuple[Values, Values]]:
        """Save, load into a fresh model with other weights, and make one more step with both."""
        made = tempfile.mkdtemp(prefix="mfsdp-doctor-", dir=self.task.checkpoint_dir) if dist.get_rank() == 0 else ""
        folder = Path(gather_objects(made)[0])
        try:
            checkpointer = Checkpointer(folder)
            checkpointer.save(self.task.steps, trainee.model, trainee.optimizer)
            saved = _everything(trainee)
            fresh = self._trainee(self.task.seed + _OTHER_SEED)
            checkpointer.load(fresh.model, fresh.optimizer)
            loaded, later = _everything(fresh), self.task.steps + 1
            went_on, resumed = (self._step(each, later)[WEIGHT, later] for each in (trainee, fresh))
            return {(LOADED, 0): (saved, loaded), (RESUMED, later): (went_on, resumed)}
        finally:
            if made:
                shutil.rmtree(made, ignore_errors=True)


def _everything(trainee: Trainee) -> Values:
    counters, state = trainee.optimizer_state()
    return {**trainee.parameters(), **state, **{f"{name}: step": count for name, count in counters.items()}}


def _disagreements(values: Mapping[Place, Values]) -> dict[Place, dict[str, tuple[Tensor | None, ...]]]:
    """Return each rank's values where ranks differ, in the first place that has a difference.

    This takes one collective, and a second if there is such a place.
    """
    mine = {(place, name): digest_of(value) for place, here in values.items() for name, value in here.items()}
    everyone = gather_objects(mine)
    keys = dict.fromkeys(key for of_rank in everyone for key in of_rank)
    different = [key for key in keys if len({of_rank.get(key) for of_rank in everyone}) > 1]
    for place in values:
        names = [name for at, name in different if at == place]
        if names:
            of_ranks = gather_objects({name: values[place].get(name) for name in names})
            return {place: {name: tuple(of_rank[name] for of_rank in of_ranks) for name in names}}
    return {}
