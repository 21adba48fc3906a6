"""One training run from start to end, on one rank."""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from megatron_fsdp.comm.agreement import decided_by_first
from megatron_fsdp.train.checkpoints import Origin, RunCheckpoints, find_origin, with_saved_batch
from megatron_fsdp.train.console import ConsoleWatcher, library_messages, make_console, print_message, show_header
from megatron_fsdp.train.data.batches import make_feed
from megatron_fsdp.train.data.preparation import TokenData, prepare_data
from megatron_fsdp.train.engines.sharded import build
from megatron_fsdp.train.faults import HangWatch, Pulse, memory_told, telling_of_memory
from megatron_fsdp.train.loop import Run, train
from megatron_fsdp.train.measure import Evaluation, Speed, peak_tflops
from megatron_fsdp.train.models.build import model_flops
from megatron_fsdp.train.options.checks import require_packages
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import flag_for
from megatron_fsdp.train.ranks import Rank, goes_on_without_others
from megatron_fsdp.train.recorder import (
    APPLIED_FILE,
    Recorder,
    applied,
    applied_rows,
    find_writers,
    preset_rows,
    to_json,
)
from megatron_fsdp.train.results import (
    attempt,
    claim_results,
    claim_saves,
    conclude,
    export,
    has_results,
    require_new_export,
    save,
    show,
)


def run_job(job: Job, rank: Rank) -> bool:
    """Prepare, train, and show the results; a run that was interrupted saves and shows none.

    Returns whether this rank should be started again, since it ended only because another machine leaves.
    """
    console = make_console(is_first=rank.is_first)
    say = partial(print_message, console)
    require_packages(job.options)
    seed = job.options.training.seed
    random.seed(seed)  # every generator whose state a checkpoint holds, so that equal runs leave equal ones
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    with telling_of_memory(lambda error: memory_told(error, job, rank, step=0)), ExitStack() as held:
        claim_saves(job, held)
        origin = find_origin(job, say)
        goes_on = job.restarts > 0 or (job.load_is_optional and origin.folder is not None)
        target = job.options.checkpoint.export_hf
        if target is not None and not goes_on:
            decided_by_first(lambda: require_new_export(target), f"looking into {target}")
        folder = claim_results(job, held, goes_on=goes_on)
        with console.status("reading text ..."):
            data = prepare_data(job, folder, rank)
        return run_in(folder, with_saved_batch(job, origin, say), rank, data, origin, console)


def run_in(folder: Path, job: Job, rank: Rank, data: TokenData, origin: Origin, console: Console) -> bool:
    """Train and show the results (see `run_job`), in a folder that is this run's alone."""
    say = partial(print_message, console)
    pulse = Pulse()
    flops = model_flops(job, data.vocabulary.vocab_size) * job.batch.total
    speed = Speed(job.tokens_per_step, flops, rank.count, peak_tflops(job, rank.device))
    watch = HangWatch(folder, job, rank, pulse)
    show_header(console, applied_rows(job, rank, data, folder, speed), preset_rows(job.options))
    with (
        library_messages(console, job.options.reporting.logging_level),
        telling_of_memory(lambda error: memory_told(error, job, rank, pulse.step)),
        watch,
    ):
        trained = build(job, data.vocabulary.vocab_size, rank)
        feed = make_feed(data, job, trained.data_index, pins=trained.device.type != "cpu")
        watch.keep_log(trained.inside)
        run = Run(job, trained, data, feed, rank, speed, pulse)
        display = ConsoleWatcher(console, job.train_iters, job.limit_s)
        with display, RunCheckpoints(job, trained, data, origin, display.say) as keeper:
            recorder = make_recorder(run, display, folder)
            try:
                outcome = train(run, recorder, keeper)
            finally:
                recorder.close()
        feed.close()
        steps = outcome.progress.steps
        if outcome.is_interrupted:
            say(stopped_words(job, steps))
            return goes_on_without_others(is_asked=keeper.is_interrupted)
        if reason := early_words(job, steps):
            say(reason)
        if keeper.is_finished and decided_by_first(lambda: has_results(folder, steps), f"looking into {folder}"):
            say(f"its results are there: {folder}")
            return False
        with pulse.resting(), console.status("measuring held-out loss and writing a sample ..."):
            results = conclude(run, outcome)
            if (target := job.options.checkpoint.export_hf) is not None:
                export(run, target)
                say(f"exported {target}: Hugging Face files, in {str(job.dtype).removeprefix('torch.')}")
    recorder.conclude(Evaluation(steps, results.held_out_loss))
    if rank.is_first:
        save(folder, job, recorder, outcome, results, say)
    show(console, folder, outcome, results)
    return False


def stopped_words(job: Job, steps: int) -> str:
    """Describe a run that was asked to end."""
    saved = job.options.checkpoint.save
    if steps < job.train_iters:
        return f"stopped and saved after {steps} steps; --load {saved} goes on from there"
    return f"stopped and saved after all {steps} steps; --load {saved} --skip-train measures and shows the results"


def early_words(job: Job, steps: int) -> str:
    """Say why a run that was not interrupted has not done all steps; empty if it has."""
    training, origins = job.options.training, job.options.origins
    if steps >= job.train_iters or training.skip_train:
        return ""
    is_interval = training.exit_interval is not None and steps % training.exit_interval == 0
    name = "exit_interval" if is_interval else "exit_duration_in_mins"
    value = getattr(training, name)
    if value is None:
        return ""
    said = f"{flag_for(name)} {value:g} says (from the {origins[name]})"
    return f"ended after {steps} of {job.train_iters} steps, as {said}"


def make_recorder(run: Run, display: ConsoleWatcher, folder: Path) -> Recorder:
    """Make the recorder of a run; on the first rank it writes, also what was applied."""
    if not run.rank.is_first:
        return Recorder(display)
    found = applied(run.job)
    attempt("what was applied", lambda: (folder / APPLIED_FILE).write_text(to_json(found, 2) + "\n"), display.say)
    return Recorder(display, folder, find_writers(run.job, folder, found["options"]))
