"""One training run from start to end, on one rank: its folder, its training, and its results."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from megatron_fsdp.checkpoint.report import decided_by_first
from megatron_fsdp.checkpoint.store import claim
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.config.hang_log import FOLDER_VARIABLE
from megatron_fsdp.describe.description import in_bytes
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.audit import Audit
from megatron_fsdp.train.checkpoints import Origin, RunCheckpoints, facts_of, find_origin, with_saved_batch
from megatron_fsdp.train.console import (
    ConsoleWatcher,
    library_messages,
    make_console,
    print_message,
    show_comparison,
    show_header,
)
from megatron_fsdp.train.data.batches import make_feed
from megatron_fsdp.train.data.preparation import TokenData, prepare_data
from megatron_fsdp.train.engines.trained import Trained, build
from megatron_fsdp.train.failures import memory_told, telling_of_memory
from megatron_fsdp.train.loop import Outcome, Run, evaluate, train
from megatron_fsdp.train.measure import Evaluation, Row, Speed, compare, describe_peak, peak_bytes, peak_tflops
from megatron_fsdp.train.models.build import model_flops, transformers_config
from megatron_fsdp.train.options.checks import require_packages
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import flag_for
from megatron_fsdp.train.ranks import Rank
from megatron_fsdp.train.recorder import (
    APPLIED_FILE,
    METRICS_FILE,
    Recorder,
    applied,
    applied_rows,
    find_writers,
    preset_rows,
    to_json,
)

FINAL_TIMES = 4  # factor for the samples of the final evaluation
SUMMARY_FILE = "summary.json"
HANG_FOLDER = "hang"
_RESULTS_CLAIM, _SAVES_CLAIM = ".claim", ".claim-of-saves"  # one folder may be both
_RUN_ID = "TORCHELASTIC_RUN_ID"
_NO_NAMES = ("", "none")

Say = Callable[[str], None]


def run_job(job: Job, rank: Rank) -> None:
    """Prepare, train, and show the results; a run that was interrupted saves and shows none."""
    console = make_console(is_first=rank.is_first)
    say = partial(print_message, console)
    require_packages(job.options)
    checkpoint = job.options.checkpoint
    seed_everything(job.options.training.seed)
    with telling_of_memory(partial(memory_told, job, rank, 0)), ExitStack() as held:
        if (saves := checkpoint.save) is not None:
            decided_by_first(lambda: claim_folder(saves, _SAVES_CLAIM, "--save", job, held), f"looking into {saves}")
        origin = find_origin(job, say)
        goes_on = job.restarts > 0 or (job.load_is_optional and origin.folder is not None)
        if (target := checkpoint.export_hf) is not None and not goes_on:
            decided_by_first(lambda: make_new_export(target), f"looking into {target}")
        folder = decided_by_first(lambda: claim_results(job, held, goes_on=goes_on), "making the folder of results")
        with console.status("reading text ..."):
            data = prepare_data(job, folder, rank)
        run_in(folder, with_saved_batch(job, origin, rank, say), rank, data, origin, console)


def seed_everything(seed: int) -> None:
    """Seed every generator whose state a checkpoint holds, so that equal runs leave equal ones."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def run_in(folder: Path, job: Job, rank: Rank, data: TokenData, origin: Origin, console: Console) -> None:
    """Train and show the results (see `run_job`), in a folder that is this run's alone."""
    say = partial(print_message, console)
    flops = model_flops(job, data.vocab_size) * job.batch.total
    speed = Speed(job.tokens_per_step, flops, rank.count, peak_tflops(job, rank.device))
    show_header(console, applied_rows(job, rank, data, folder, speed), preset_rows(job.options))
    with library_messages(console, job.options.reporting.logging_level):
        trained = build(job, data.vocab_size, rank)
        feed = make_feed(data, job, trained.data_index, pins=trained.device.type != "cpu")
        audit = Audit(job, trained, data) if job.options.recovery.audit_share else None
        run = Run(job, trained, data, feed, rank, speed, audit)
        display = ConsoleWatcher(console, job.train_iters, job.limit_s)
        keeper = RunCheckpoints(job, trained, data, origin, display.say)
        with logging_for_hangs(trained, folder / HANG_FOLDER, rank), display, keeper:
            recorder = make_recorder(run, display, folder)
            try:
                outcome = train(run, recorder, keeper)
            finally:
                recorder.close()
        feed.close()
        steps = outcome.progress.steps
        if outcome.is_interrupted:
            say(stopped_words(job, steps))
            return
        if reason := early_words(job, steps):
            say(reason)
        if keeper.is_finished and decided_by_first(lambda: has_results(folder, steps), f"looking into {folder}"):
            say(f"its results are there: {folder}")
            return
        with console.status("measuring held-out loss ..."):
            loss = evaluate(job, trained, data, FINAL_TIMES)
            results = Results(
                loss,
                tuple(gather_objects(peak_bytes(trained))),
                describe_peak(trained),
                compare(trained, outcome.traffic, job),
            )
            if (target := job.options.checkpoint.export_hf) is not None:
                export(run, target)
                say(f"exported {target}: Hugging Face files, in {str(job.dtype).removeprefix('torch.')}")
    recorder.conclude(Evaluation(steps, results.held_out_loss))
    if rank.is_first:
        save(folder, job, recorder, outcome, results, say)
    show(console, folder, outcome, results)


@contextmanager
def logging_for_hangs(trained: Trained, folder: Path, rank: Rank) -> Iterator[None]:
    """Let a model of this package keep the log that its errors of communication tell of, unless it keeps one."""
    model = None if FOLDER_VARIABLE in os.environ else trained.inside
    if model is not None:
        model.log_for_hangs(folder)
    yield
    if model is not None:
        model.stop_logging_for_hangs()
        with suppress(OSError):  # nobody needs the log of a rank that ended well
            for path in folder.glob(f"rank-{rank.index:05d}*"):
                path.unlink()
            folder.rmdir()  # where it is empty


def make_recorder(run: Run, display: ConsoleWatcher, folder: Path) -> Recorder:
    """Make the recorder of a run; on the first rank it writes, also what was applied."""
    if not run.rank.is_first:
        return Recorder(display)
    found = {**applied(run.job), "facts": facts_of(run.job, run.data)}
    attempt("what was applied", lambda: (folder / APPLIED_FILE).write_text(to_json(found, 2) + "\n"), display.say)
    return Recorder(display, folder, find_writers(run.job, folder, found["options"]))


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


# ---- folders ---------------------------------------------------------------------------------------------------------


def claim_results(job: Job, held: ExitStack, *, goes_on: bool) -> Path:
    """Make the folder, or find that of the run that is resumed, for this run alone until `held` ends."""
    folder = job.options.reporting.out
    if folder is None:
        name = os.environ.get(_RUN_ID, "")
        if name in _NO_NAMES or not name.replace("-", "").replace("_", "").isalnum():
            name = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}"
        folder = Path("runs", name)
    folder = folder.absolute()
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
    """Make a folder, and claim it for this run until `held` or the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    except OSError as error:
        raise ConfigurationError(
            f"{flag} {folder} cannot be written ({error.strerror}): give another folder"
        ) from error
    # A rank before a restart may still be about to end.
    if not claim(folder / name, held) and job.restarts == 0:
        raise ConfigurationError(
            f"{flag} {folder}: another run writes into it now; give another folder, or start again when that one has "
            "ended"
        )


def make_new_export(folder: Path) -> None:
    """Make the folder of `--export-hf` before training, which may be there if it is empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ConfigurationError(
            f"--export-hf {folder} cannot be made ({error.strerror}): give a folder in a place that can be written"
        ) from error
    if not is_empty:
        raise ConfigurationError(f"--export-hf {folder} is there already: give a new folder, or an empty one")


def has_results(folder: Path, steps: int) -> bool:
    """Return whether a folder has the results of a run of `steps` steps."""
    try:
        found = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        return bool(found["progress"]["steps"] == steps)
    except (OSError, ValueError, KeyError, TypeError):
        return False


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The results of a finished run; the loss is in nats per token."""

    held_out_loss: float
    peaks_bytes: tuple[int, ...]
    peak_meaning: str
    comparison: tuple[Row, ...] = ()  # the last step on this rank; none with an engine that counts nothing


def export(run: Run, folder: Path) -> None:
    """Write the model as Hugging Face files, with the tokenizer and templates of `--hf-model`; collective."""
    from megatron_fsdp.automodel.gradients import reshard_units
    from megatron_fsdp.checkpoint.hf import save_hf

    options, model = run.job.options.model, run.trained.model
    reshard_units(model)  # FSDP2 shows gathered weights after the forwards of an evaluation
    is_new = options.hf_model is None  # else the folder has a configuration
    config = transformers_config(options, run.data.vocab_size) if is_new else None
    save_hf(model, folder, dtype=run.job.dtype, carry_from=options.hf_model, config=config)


def save(folder: Path, job: Job, recorder: Recorder, outcome: Outcome, results: Results, say: Say) -> None:
    """Write the summary; report if it cannot be written."""
    summary = {
        **applied(job),
        "progress": asdict(outcome.progress),
        "last_training_loss": recorder.records[-1].loss if recorder.records else None,
        "evaluations": [asdict(evaluation) for evaluation in recorder.evaluations],
        **asdict(results),
    }
    attempt("the summary", lambda: (folder / SUMMARY_FILE).write_text(to_json(summary, 2) + "\n"), say)


def attempt(what: str, work: Callable[[], object], say: Say) -> None:
    """Write something that a run can do without; report why if it could not be written."""
    try:
        work()
    except OSError as error:
        say(f"{what} could not be written: {error}")


def show(console: Console, folder: Path, outcome: Outcome, results: Results) -> None:
    """Print the results."""
    done, say = outcome.progress, partial(print_message, console)
    perplexity = Evaluation(done.steps, results.held_out_loss).perplexity
    say(
        f"held-out loss {results.held_out_loss:.3f} nats per token, perplexity {perplexity:.2f}, "
        f"after {done.steps} steps in {done.elapsed_s:.0f} s"
    )
    say(f"peak memory per rank ({results.peak_meaning}): {', '.join(map(in_bytes, results.peaks_bytes))}")
    if results.comparison:
        show_comparison(console, results.comparison)
    say(f"metrics and summary: {folder}")
