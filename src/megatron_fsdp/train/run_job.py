"""One training run from start to end, on one rank."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.checkpoints import RunCheckpoints
from megatron_fsdp.train.data.feed import make_feed
from megatron_fsdp.train.data.preparation import TokenData, prepare_data
from megatron_fsdp.train.engines.build import build
from megatron_fsdp.train.evaluation import evaluate, evaluating
from megatron_fsdp.train.generate import generate
from megatron_fsdp.train.launch.ranks import Rank, agree, gather_values, goes_on_without_others
from megatron_fsdp.train.loop import Outcome, Run, train
from megatron_fsdp.train.models.flops import model_flops
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import flag_for
from megatron_fsdp.train.recovery.hangs import HangWatch
from megatron_fsdp.train.recovery.memory import telling_of_memory
from megatron_fsdp.train.recovery.pulse import Pulse
from megatron_fsdp.train.recovery.resuming import Origin, find_origin, with_saved_batch
from megatron_fsdp.train.reporting.applied import (
    APPLIED_FILE,
    applied,
    applied_rows,
    engine_words,
    preset_rows,
    tracker_config,
)
from megatron_fsdp.train.reporting.comparison import Measurement, Plan, Row, compare
from megatron_fsdp.train.reporting.console import (
    format_bytes,
    library_messages,
    make_console,
    print_message,
    printable,
    show_comparison,
    show_header,
)
from megatron_fsdp.train.reporting.display import ConsoleWatcher
from megatron_fsdp.train.reporting.metrics import Evaluation, to_json
from megatron_fsdp.train.reporting.peak import Peak, find_peak
from megatron_fsdp.train.reporting.plot import plot_run
from megatron_fsdp.train.reporting.readings import describe_peak, exchanges_pairwise, optimizer_bytes, peak_bytes
from megatron_fsdp.train.reporting.recorder import Recorder
from megatron_fsdp.train.reporting.speed import Speed
from megatron_fsdp.train.reporting.writers.build import build_writers, require_writers
from megatron_fsdp.train.results_folder import SUMMARY_FILE, results_folder, saving_alone

TEMPERATURE = 0.7
FINAL_TIMES = 4  # the last evaluation sees so many times as many samples as those on the way
SAMPLE_FILE = "sample.txt"


@dataclass(frozen=True)
class Results:
    """What a finished run has to show.

    Attributes:
        held_out_loss: Mean on held-out text, in nats per token.
        bits_per_byte: The same in bits per byte of text, which does not depend on the tokenizer; NaN: not known.
        sample: Text that the model wrote.
        rows: Measured values beside computed ones.
        peaks_bytes: Peak of memory of every rank.
        peak_meaning: What the peaks count.
    """

    held_out_loss: float
    bits_per_byte: float
    sample: str
    rows: tuple[Row, ...]
    peaks_bytes: tuple[int, ...]
    peak_meaning: str


def run_job(job: Job, rank: Rank) -> bool:
    """Prepare, train, and show the results; a run that was interrupted saves and shows none.

    Returns:
        Whether this rank should be started again, since it ended for no other reason than that another machine leaves.

    Raises:
        CheckpointError: On every rank, for a checkpoint that cannot be loaded or saved.
        ConfigurationError: On every rank, for what is wrong with the data or the folder.
        NonFiniteStepError: On every rank, where too many steps in a row were not finite.
        NotSavedError: On every rank, where too many saves failed, or the last.
        OutOfMemoryError: On the rank that had no memory left.
    """
    console = make_console(is_first=rank.is_first)
    require_writers(job.options.reporting)
    seed_generators(job.options.training.seed)
    with telling_of_memory(job, rank, Pulse()), saving_alone(job, rank):
        origin = find_origin(job, teller(console))
        goes_on = job.restarts > 0 or (job.load_is_optional and origin.folder is not None)
        with results_folder(job, rank, goes_on=goes_on) as folder:
            with console.status("reading text ..."):
                data = prepare_data(job, folder, rank)
            return run_in(folder, with_saved_batch(job, origin, teller(console)), rank, data, origin, console)


def run_in(folder: Path, job: Job, rank: Rank, data: TokenData, origin: Origin, console: Console) -> bool:
    """Train and show the results; see `run_job`.

    Args:
        folder: Of results.
        job: The run, with the batch that it goes on with.
        rank: This process.
        data: The tokens.
        origin: Where it begins.
        console: Of this rank.
    """
    say = teller(console)
    peak = find_peak(job, rank)
    speed = speed_of(job, rank, data, peak)
    pulse = Pulse()
    watch = HangWatch(folder, job, rank, pulse)
    show_header(console, applied_rows(job, rank, data, folder, speed, peak), preset_rows(job.options))
    with library_messages(console), telling_of_memory(job, rank, pulse), watch:
        trained = build(job, data.vocabulary.vocab_size, rank)
        feed = make_feed(data, job, trained.data_index, pins=trained.device.type != "cpu")
        watch.keep_log(trained)
        run = Run(job, trained, data, feed, rank, speed, pulse)
        with display_of(console, job) as display, RunCheckpoints(run, origin, display.say) as keeper:
            recorder = make_recorder(run, display, folder)
            try:
                outcome = train(run, recorder, keeper, recorder.lacks_evaluation)
            finally:
                recorder.close()
        feed.close()
        if outcome.is_interrupted:
            say(stopped_words(job, outcome.progress.steps))
            return goes_on_without_others(rank, is_asked=keeper.is_interrupted)
        if reason := early_words(job, outcome.progress.steps):
            say(reason)
        if keeper.is_finished and agree(rank, lambda: has_results(folder, outcome.progress.steps)):
            say(f"its results are there: {folder}")
            return False
        with pulse.resting(), console.status("measuring held-out loss and writing a sample ..."):
            results = conclude(run, outcome)
    recorder.conclude(Evaluation(outcome.progress.steps, results.held_out_loss))
    if rank.is_first:
        save(folder, job, recorder, outcome, results, say)
    show(console, folder, outcome, results)
    return False


def teller(console: Console) -> Callable[[str], None]:
    """What prints lines as they are: a path may have what would be markup."""
    return lambda text: print_message(console, printable(text))


def stopped_words(job: Job, steps: int) -> str:
    """What to tell of a run that was asked to end."""
    saved = job.options.checkpoint.save
    if steps < job.train_iters:
        return f"stopped and saved after {steps} steps; --load {saved} goes on from there"
    return f"stopped and saved after all {steps} steps; --load {saved} --skip-train measures and shows the results"


def early_words(job: Job, steps: int) -> str:
    """Why a run that nobody asked to end has not done all steps; empty where it has."""
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


def has_results(folder: Path, steps: int) -> bool:
    """Whether a folder has the results of a run of so many steps."""
    try:
        found = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        return bool(found["progress"]["steps"] == steps)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def speed_of(job: Job, rank: Rank, data: TokenData, peak: Peak) -> Speed:
    """What a step costs, and what a rank could do."""
    flops = model_flops(job, data.vocabulary.vocab_size) * job.batch.total
    return Speed(job.tokens_per_step, flops, rank.count, peak.tflops)


def display_of(console: Console, job: Job) -> ConsoleWatcher:
    """The display of a run."""
    limit = job.options.training.exit_duration_in_mins
    return ConsoleWatcher(console, job.train_iters, math.inf if limit is None else 60.0 * limit)


def make_recorder(run: Run, display: ConsoleWatcher, folder: Path) -> Recorder:
    """The watcher of a run; on the first rank it writes, and says in a file what was applied."""
    if not run.rank.is_first:
        return Recorder(display, None)
    found = applied(run.job)
    attempt("what was applied", lambda: (folder / APPLIED_FILE).write_text(to_json(found, 2) + "\n"), display.say)
    return Recorder(display, folder, build_writers(run.job, folder, tracker_config(found), display.say))


def seed_generators(seed: int) -> None:
    """Seed every generator whose state a checkpoint holds, so that equal runs leave equal checkpoints."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def conclude(run: Run, outcome: Outcome) -> Results:
    """Measure and sample after training; all ranks take part."""
    loss = evaluate(run.job, run.trained, run.data, FINAL_TIMES)
    bits = math.nan
    if run.data.held_out_bytes:
        bits = loss / math.log(2) * len(run.data.held_out) / run.data.held_out_bytes
    peaks = gather_values(run.rank, peak_bytes(run.trained))
    return Results(loss, bits, write_sample(run), compared(run, outcome), tuple(peaks), describe_peak(run.trained))


def write_sample(run: Run) -> str:
    """Let the model continue the prompt; empty where there is none."""
    reporting, vocabulary = run.job.options.reporting, run.data.vocabulary
    if not reporting.prompt:
        return ""
    prompt = vocabulary.encode([reporting.prompt])[0].tolist()
    if not prompt:  # token ids that stand for no text
        return ""
    with evaluating(run.trained.model):
        ids = generate(
            run.trained,
            prompt,
            num_tokens=reporting.sample_tokens,
            context_length=run.job.seq_length,
            temperature=TEMPERATURE,
            seed=run.job.options.training.seed,
            vocab_size=vocabulary.vocab_size,
        )
    return vocabulary.decode(ids)


def compared(run: Run, outcome: Outcome) -> tuple[Row, ...]:
    """Measured values beside those of the formulas; none with an engine that does not count."""
    model = run.trained.inside
    if model is None or outcome.step_counters is None:
        return ()
    plan = Plan(
        model.footprints(),
        model.resolved.strategy,
        microbatches=run.job.batch.microbatches,
        exchanges_pairwise=exchanges_pairwise(model),
    )
    return compare(Measurement(model.memory(), optimizer_bytes(run.trained.optimizer), outcome.step_counters), plan)


def save(
    folder: Path, job: Job, recorder: Recorder, outcome: Outcome, results: Results, say: Callable[[str], None]
) -> None:
    """Write summary, sample and pictures; what cannot be written is said."""
    summary = {
        **applied(job),
        "progress": asdict(outcome.progress),
        "last_training_loss": recorder.records[-1].loss if recorder.records else None,
        "evaluations": [asdict(evaluation) for evaluation in recorder.evaluations],
        **asdict(results),
    }
    title = f"{engine_words(job)}, {str(job.dtype).removeprefix('torch.')}"
    attempt("the sample", lambda: (folder / SAMPLE_FILE).write_text(results.sample, encoding="utf-8"), say)
    attempt("the summary", lambda: (folder / SUMMARY_FILE).write_text(to_json(summary, 2) + "\n"), say)
    if recorder.records:
        attempt("the pictures", lambda: plot_run(folder, recorder.records, recorder.evaluations, title), say)


def attempt(what: str, work: Callable[[], object], say: Callable[[str], None]) -> None:
    """Write something that a run can do without; say why it could not be written."""
    try:
        work()
    except (OSError, ConfigurationError) as error:
        say(f"{what} could not be written: {error}")


def show(console: Console, folder: Path, outcome: Outcome, results: Results) -> None:
    """Print the results."""
    done, say = outcome.progress, teller(console)
    perplexity = Evaluation(done.steps, results.held_out_loss).perplexity
    say(
        f"held-out loss {results.held_out_loss:.3f} nats per token, perplexity {perplexity:.2f}, "
        f"{results.bits_per_byte:.3f} bits per byte, after {done.steps} steps in {done.elapsed_s:.0f} s"
    )
    if results.sample:
        console.print(Panel(Text(printable(results.sample)), title="the model writes", expand=False))
    if results.rows:
        show_comparison(console, results.rows)
    say(f"peak memory per rank ({results.peak_meaning}): {', '.join(map(format_bytes, results.peaks_bytes))}")
    print_message(console, f"curves, metrics, log, sample and summary: {folder}")
