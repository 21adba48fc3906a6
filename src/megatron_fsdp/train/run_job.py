"""One training run from start to end, on one rank: its folder, its training, and its results."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megatron_fsdp.checkpoint.report import decided_by_first
from megatron_fsdp.checkpoint.store import claim
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.comm.processes import RUN_ID, is_launcher_alive, launcher
from megatron_fsdp.config.engine_options import FOLDER_VARIABLE
from megatron_fsdp.describe.text import in_bytes
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.checkpoints import Origin, RunCheckpoints, facts_of, find_origin, with_saved_batch
from megatron_fsdp.train.console import Say, console, header, library_messages, stamped
from megatron_fsdp.train.data.preparation import prepare_data
from megatron_fsdp.train.data.tokens import TokenData, make_feed
from megatron_fsdp.train.failures import describing_memory_errors, memory_advice
from megatron_fsdp.train.loop import Run, evaluate, train
from megatron_fsdp.train.measure import Evaluation, Speed, StepRecord, describe_peak, peak_bytes, peak_tflops
from megatron_fsdp.train.models.build import model_flops
from megatron_fsdp.train.models.trained import Trained, build
from megatron_fsdp.train.options import flag_for
from megatron_fsdp.train.options.checks import require_there
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.ranks import Rank
from megatron_fsdp.train.recorder import (
    APPLIED_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    Recorder,
    applied,
    find_writers,
    header_rows,
    read_lines,
    to_json,
)

FINAL_TIMES = 4  # factor for the samples of the final evaluation
SUMMARY_FILE = "summary.json"
HANG_FOLDER = "hang"
_RESULTS_CLAIM, _SAVES_CLAIM = ".claim", ".claim-of-saves"  # one folder may be both


def run_job(job: Job, rank: Rank) -> None:
    """Prepare, train, and show the results; a run that was interrupted saves and shows none."""
    say = console(is_first=rank.is_first)
    require_there(job.options)
    seed_everything(job.options.training.seed)
    with describing_memory_errors(partial(memory_advice, job, rank, 0)), ExitStack() as held:
        if (saves := job.options.checkpoint.save) is not None:
            decided_by_first(lambda: claim_folder(saves, _SAVES_CLAIM, "--save", job, held), f"looking into {saves}")
        origin = find_origin(job, say)
        goes_on = job.restarts > 0 or (job.load_is_optional and origin.folder is not None)
        folder = decided_by_first(lambda: claim_results(job, held, goes_on=goes_on), "making the folder of results")
        data = prepare_data(job, folder, rank, say)
        run_in(folder, with_saved_batch(job, origin, rank, say), rank, data, origin, say)


def seed_everything(seed: int) -> None:
    """Seed every generator whose state a checkpoint holds, so that equal runs leave equal ones."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def run_in(folder: Path, job: Job, rank: Rank, data: TokenData, origin: Origin, say: Say) -> None:
    """Train and show the results (see `run_job`), in a folder that is this run's alone."""
    flops = model_flops(job, data.vocab_size) * job.batch.total
    speed = Speed(job.tokens_per_step, flops, rank.count, peak_tflops(job, rank.device))
    say("\n".join(header(header_rows(job, rank, data, folder, speed))))
    say = stamped(say)
    with library_messages(say, job.options.reporting.logging_level):
        trained = build(job, data.vocab_size, rank)
        feed = make_feed(data, job, trained.data_index, pins=trained.device.type != "cpu")
        run = Run(job, trained, data, feed, rank, speed)
        keeper = RunCheckpoints(job, trained, data, origin, say)
        # In this order, so that the log hears of SIGTERM before the keeper does, which may wait in a collective.
        with keeper.until_saved(), logging_for_hangs(trained, folder / HANG_FOLDER, rank):
            writers = {}
            if rank.is_first:
                found = {**applied(job), "facts": facts_of(job, data)}
                write_json(folder / APPLIED_FILE, found, say)
                writers = find_writers(job, folder, found["options"], say)
            recorder = Recorder(say, writers)
            try:
                done, is_interrupted = train(run, recorder, keeper)
            finally:
                recorder.close()
        feed.close()
        if reason := end_summary(job, done.steps, is_interrupted=is_interrupted):
            say(reason)
        if is_interrupted:
            return
        final = Evaluation(done.steps, evaluate(job, trained, data, FINAL_TIMES))
        peaks, meaning = gather_objects(peak_bytes(trained)), describe_peak(trained)
    if rank.is_first:
        records = read_lines(folder / METRICS_FILE, StepRecord)
        before = read_lines(folder / EVALUATIONS_FILE, Evaluation)
        summary = {
            **applied(job),
            "progress": asdict(done),
            "last_training_loss": records[-1].loss if records else None,
            # The final one has more samples than another one after the same step.
            "evaluations": [asdict(each) for each in before if each.step != final.step] + [asdict(final)],
            "held_out_loss": final.loss,
            "peaks_bytes": peaks,
            "peak_meaning": meaning,
        }
        write_json(folder / SUMMARY_FILE, summary, say)
    say(
        f"held-out loss {final.loss:.3f} nats per token, perplexity {final.perplexity:.2f}, after {done.steps} steps "
        f"in {done.elapsed_s:.0f} s\npeak memory of a rank: {in_bytes(max(peaks))} ({meaning})"
    )
    say(f"metrics and summary: {folder}")


@contextmanager
def logging_for_hangs(trained: Trained, folder: Path, rank: Rank) -> Iterator[None]:
    """Keep the log for hangs of a model of this package, which its communication errors use, unless it has one."""
    model = None if FOLDER_VARIABLE in os.environ else trained.inside
    if model is not None:
        model.log_for_hangs(folder)
    yield
    if model is not None:
        model.stop_logging_for_hangs()
        with suppress(OSError):  # the log of a rank that ended well is not needed
            for path in folder.glob(f"rank-{rank.index:05d}*"):
                path.unlink()
            folder.rmdir()  # where it is empty


def write_json(path: Path, values: object, say: Say) -> None:
    """Write a dispensable file; report the reason if it could not be written."""
    try:
        path.write_text(to_json(values, 2) + "\n", encoding="utf-8")
    except OSError as error:
        say(f"{path.name} could not be written: {error}")


def end_summary(job: Job, steps: int, *, is_interrupted: bool) -> str:
    """Describe the reason why a run ends here; empty if it has done all steps."""
    training, origins, saved = job.options.training, job.options.origins, job.options.checkpoint.save
    if is_interrupted and steps < job.train_iters:
        return f"stopped and saved after {steps} steps; --load {saved} continues from there"
    if is_interrupted:
        return f"stopped and saved after all {steps} steps; --load {saved} --skip-train measures and shows the results"
    is_interval = training.exit_interval is not None and steps % training.exit_interval == 0
    name = "exit_interval" if is_interval else "exit_duration_in_mins"
    if steps >= job.train_iters or training.skip_train or name not in origins:
        return ""
    said = f"{flag_for(name)} {getattr(training, name):g} says (from the {origins[name]})"
    return f"ended after {steps} of {job.train_iters} steps, as {said}"


# ---- folders ---------------------------------------------------------------------------------------------------------


def claim_results(job: Job, held: ExitStack, *, goes_on: bool) -> Path:
    """Make the folder, or find that of the resumed run, for this run alone until `held` ends."""
    name = os.environ.get(RUN_ID, "none")
    if name == "none" or not re.fullmatch(r"[\w-]+", name):
        name = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"
    folder = (job.options.reporting.out or Path("runs", name)).absolute()
    claim_folder(folder, _RESULTS_CLAIM, "--out", job, held)
    if not goes_on and any((folder / name).exists() for name in (METRICS_FILE, SUMMARY_FILE)):
        checkpoint = job.options.checkpoint
        none_yet = f", and {checkpoint.save} holds no checkpoint to go on from" if checkpoint.is_same_folder else ""
        raise ConfigurationError(
            f"--out {folder} holds an earlier run{none_yet}: give a new folder, or remove that one; or let this run go "
            "on from it, with one folder for --load and --save"
        )
    return folder


def claim_folder(folder: Path, name: str, flag: str, job: Job, held: ExitStack) -> None:
    """Make a folder, and claim it for this run.

    A lock holds until `held` or the process ends. If an elastic agent started this rank, its name in the locked file
    continues the claim while that agent lives and the run has not ended well: between the death of ranks and their
    restart the lock is free.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
        before, mine = path.read_text(), launcher()
        is_mine = bool(mine) and before == mine
        is_free = is_mine or not is_launcher_alive(before)
        # A rank before a restart may still be about to end.
        if not (is_free and claim(path, held)) and not (is_mine and job.restarts):
            raise ConfigurationError(
                f"{flag} {folder}: another run writes into it now; give another folder, or start again when that one "
                "has ended"
            )
        path.write_text(mine or "x")
    except OSError as error:
        raise ConfigurationError(
            f"{flag} {folder} cannot be written ({error.strerror}): give another folder"
        ) from error

    def release(raised: type[BaseException] | None, *_: object) -> None:
        if raised is None:
            with suppress(OSError):
                path.write_text("x")

    held.push(release)
