"""`check_parity`: the user's own model, sharded, against one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.config.strategy import resolve_strategy
from megatron_fsdp.doctor.compare import compare
from megatron_fsdp.doctor.local_ranks import run_on_local_ranks
from megatron_fsdp.doctor.reference import Reference, run_reference
from megatron_fsdp.doctor.report import BUFFER, INITIAL, ParityReport, RunReport
from megatron_fsdp.doctor.sharded import run_sharded, shard_with
from megatron_fsdp.doctor.task import LossFn, ModelFn, OptimizerFn, ShardFn, Task, digest_of_batch, require_count
from megatron_fsdp.errors import ConfigurationError, RankError

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
        What differs; `.passed`, `.judged`, `.differences`, `.told()`, `.to_dict()`.

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
        part_allowed=tolerance,
        checkpoint=checkpoint,
        checkpoint_dir=checkpoint_dir,
    )
    _check(task)
    if dist.is_initialized():
        return check_on_ranks(task, device)
    return run_on_local_ranks(check_on_ranks, task, ranks, device, timeout_s)


def check_on_ranks(task: Task, device_name: str | None) -> ParityReport:
    """Run the check on the existing ranks; collective. Rank 0 also runs the one process, while the others wait.

    Returns:
        The same report on every rank.
    """
    device = _device(device_name)
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_generators(device)):
        return _check_here(task, device)


def _generators(device: torch.device) -> str:
    """Return the device type whose random state is restored; torch requires one even on the CPU."""
    return "cuda" if device.type == "cpu" else device.type


def _check_here(task: Task, device: torch.device) -> ParityReport:
    num_ranks = dist.get_world_size()
    task = _with_batches(task)
    right = _together(
        lambda: run_reference(task, num_ranks, device) if dist.get_rank() == 0 else None,
        "the model could not be trained in one process, without any sharding",
    )
    can_compare, known = _from_first((right.can_compare, _names(right)) if right is not None else None)
    runs = []
    for label, shard in _shardings(task, device) if can_compare else []:
        observation = run_sharded(task, shard, known, device)
        if right is not None:
            found = compare(right, observation, repeats=device.type == "cpu")
            runs.append(RunReport(label, tuple(found), () if task.checkpoint else ("checkpoint",)))
    report = None
    if right is not None:
        findings = () if right.finding is None else (right.finding,)
        report = ParityReport(num_ranks, task.steps, right.tolerance.part, findings, tuple(runs), right.notes)
    told: ParityReport = _from_first(report)
    return told


def _from_first(value: Any) -> Any:
    """Broadcast the value of rank 0; collective."""
    return gather_objects(value)[0]


def _with_batches(task: Task) -> Task:
    """Return the task with its batches, which must be the same on every rank; collective."""
    made = _together(task.with_batches, "the batches could not be made")
    digests = gather_objects([digest_of_batch(batch) for batch in made.made])
    other = [rank for rank, own in enumerate(digests) if own != digests[0]]
    if other:
        raise ConfigurationError(
            f"batch gives rank(s) {', '.join(map(str, other))} other samples than rank 0; it has to make the batch of "
            "all ranks together, the same on every rank"
        )
    return made


def _together(act: Callable[[], Result], failing: str) -> Result:
    """Call `act`, and raise on all ranks what a rank raises; collective."""
    result, failure, told = None, None, None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - the other ranks must raise it too
        failure = error
        is_usage = isinstance(error, ConfigurationError)
        told = (is_usage, str(error) if is_usage else "".join(traceback.format_exception(error)).strip())
    met = next((each for each in gather_objects(told) if each is not None), None)
    if met is None:
        return cast(Result, result)
    is_usage, text = met
    if is_usage:
        raise ConfigurationError(text) from failure
    raise RankError(f"{failing}:\n{text}") from failure


def _names(reference: Reference) -> tuple[str, ...]:
    """Return the names of parameters and buffers in the user's own model."""
    places = reference.observation.values.items()
    return tuple(name for (where, _), values in places if where in (INITIAL, BUFFER) for name in values)


def _shardings(task: Task, device: torch.device) -> list[tuple[str, ShardFn]]:
    own = task.sharding()
    if own is not None:
        return [(str(getattr(own, "__name__", "shard_fn")), own)]
    return [
        (f"strategy {place.value} ({place.name})", shard_with(place.name, device))
        for place in map(resolve_strategy, task.strategies)
    ]


def _device(name: str | None) -> torch.device:
    """Return the device on which this rank computes."""
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if found is None or dist.get_backend() == "gloo" else found.type
    if name == "cpu":
        return torch.device("cpu")
    return torch.device(name, torch.accelerator.current_device_index())


def _check(task: Task) -> None:
    """Refuse arguments that no run could honour, before ranks are started."""
    require_count("steps", task.steps)
    require_count("microbatches", task.microbatches)
    if task.reduction not in ("mean", "sum"):
        raise ConfigurationError(f'reduction is {task.reduction!r}; give "mean" or "sum"')
    if task.part_allowed is not None and not 0 <= task.part_allowed < 1:
        raise ConfigurationError(f"tolerance is {task.part_allowed!r}; give a part from 0 to 1, such as 1e-5, or None")
    if not task.strategies and task.shard_fn is None:
        raise ConfigurationError("strategies is empty; give one of 0 to 3 at least, or a shard_fn")
    for strategy in task.strategies:
        resolve_strategy(strategy)
