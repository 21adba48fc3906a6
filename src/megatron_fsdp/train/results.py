"""The folder of a run and its results: measured values and a sample."""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from megatron_fsdp.checkpoint.store import claim
from megatron_fsdp.comm.agreement import decided_by_first, gather_objects
from megatron_fsdp.describe.description import in_bytes
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.console import print_message, printable, show_comparison
from megatron_fsdp.train.engines.trained import Trained
from megatron_fsdp.train.loop import Outcome, Run, evaluate, evaluating
from megatron_fsdp.train.measure import Evaluation, Row, compare, describe_peak, peak_bytes
from megatron_fsdp.train.models.build import transformers_config
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.recorder import METRICS_FILE, Recorder, applied, to_json

TEMPERATURE = 0.7
FINAL_TIMES = 4  # factor for the samples of the final evaluation
SAMPLE_FILE = "sample.txt"
SUMMARY_FILE = "summary.json"
_RESULTS_CLAIM, _SAVES_CLAIM = ".claim", ".claim-of-saves"  # one folder may be both
_RUN_ID = "TORCHELASTIC_RUN_ID"
_NO_NAMES = ("", "none")


@dataclass(frozen=True)
class Results:
    """The results of a finished run; losses are in nats per token."""

    held_out_loss: float
    bits_per_byte: float  # of text, whatever the tokenizer; NaN: not known
    sample: str
    rows: tuple[Row, ...]
    peaks_bytes: tuple[int, ...]
    peak_meaning: str


def _folder_of(out: Path | None) -> Path:
    """Return the folder that the user named; else below `runs/` that of the job's name, or a new one with the date."""
    if out is not None:
        return out.absolute()
    run_id = os.environ.get(_RUN_ID, "")
    if run_id not in _NO_NAMES and run_id.replace("-", "").replace("_", "").isalnum():
        return Path("runs", run_id).absolute()
    return new_folder(Path("runs", f"{datetime.now().astimezone():%Y%m%d-%H%M%S}").absolute())


def new_folder(path: Path) -> Path:
    """Make a new folder: of this name, or with -2, -3 and so on if another run was faster."""
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("numbers do not end")


def claim_results(job: Job, held: ExitStack, *, goes_on: bool) -> Path:
    """Make the folder, or find that of the run that is resumed, for this run alone until `held` ends; collective."""
    return decided_by_first(lambda: _take(job, held, goes_on=goes_on), "making the folder of results")


def _take(job: Job, held: ExitStack, *, goes_on: bool) -> Path:
    try:
        folder = _folder_of(job.options.reporting.out)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--out {error.filename} cannot be made ({error.strerror}): give another folder"
        ) from None
    if not _claim(folder / _RESULTS_CLAIM, job, held):
        raise ConfigurationError(f"--out {folder}: another run writes into it now; give another folder")
    if not goes_on and any((folder / name).exists() for name in (METRICS_FILE, SUMMARY_FILE)):
        checkpoint = job.options.checkpoint
        none_yet = f", and {checkpoint.save} holds no checkpoint to go on from" if checkpoint.is_same_folder else ""
        raise ConfigurationError(
            f"--out {folder} holds an earlier run{none_yet}: give a new folder, or remove that one; or let this run go "
            "on from it, with one folder for --load and --save"
        )
    return folder


def claim_saves(job: Job, held: ExitStack) -> None:
    """Make the folder of `--save`, where there is one, and claim it for this run until `held` ends; collective."""
    folder = job.options.checkpoint.save
    if folder is not None:
        decided_by_first(lambda: _take_saves(folder, job, held), f"looking into {folder}")


def _take_saves(folder: Path, job: Job, held: ExitStack) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(b"x")
    except OSError as error:
        raise ConfigurationError(
            f"--save {folder} cannot be written ({error.strerror}): give a folder that can be"
        ) from error
    if not _claim(folder / _SAVES_CLAIM, job, held):
        raise ConfigurationError(
            f"--save {folder}: another run saves into it now; give another folder, or start again when that one has "
            "ended"
        )


def _claim(file: Path, job: Job, held: ExitStack) -> bool:
    """Claim the folder of a file until `held` or the process ends; return False if another run has it."""
    with suppress(OSError):
        file.touch()
    return claim(file, held) or job.restarts > 0  # a rank before a restart may still be about to end


def require_new_export(folder: Path) -> None:
    """Check before training that `--export-hf` names a folder that is not there yet, or empty, and can be made."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigurationError(f"--export-hf {folder} is there already: give a new folder, or an empty one")
    place = next(parent for parent in folder.absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=place):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--export-hf {folder} cannot be made ({error.strerror}): give a folder in a place that can be written"
        ) from error


def export(run: Run, folder: Path) -> None:
    """Write the model as Hugging Face files, with the tokenizer and templates of `--hf-model`; collective."""
    from megatron_fsdp.automodel.gradients import reshard_units
    from megatron_fsdp.checkpoint.hf import save_hf

    options, model = run.job.options.model, run.trained.model
    reshard_units(model)  # FSDP2 shows gathered weights after the forwards of an evaluation
    is_new = options.hf_model is None  # else the folder has a configuration
    config = transformers_config(options, run.data.vocabulary.vocab_size) if is_new else None
    save_hf(model, folder, dtype=run.job.dtype, carry_from=options.hf_model, config=config)


def has_results(folder: Path, steps: int) -> bool:
    """Return whether a folder has the results of a run of `steps` steps."""
    try:
        found = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        return bool(found["progress"]["steps"] == steps)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def conclude(run: Run, outcome: Outcome) -> Results:
    """Measure and sample after training; all ranks take part."""
    loss = evaluate(run.job, run.trained, run.data, FINAL_TIMES)
    bits = math.nan
    if run.data.held_out_bytes:
        bits = loss / math.log(2) * run.data.held_out.count / run.data.held_out_bytes
    peaks = gather_objects(peak_bytes(run.trained))
    model, optimizer, traffic = run.trained.inside, run.trained.optimizer, outcome.last_traffic
    rows: tuple[Row, ...] = ()
    if model is not None and traffic is not None:
        rows = compare(model, optimizer, traffic, run.job.batch.microbatches)
    return Results(loss, bits, write_sample(run), rows, tuple(peaks), describe_peak(run.trained))


def write_sample(run: Run) -> str:
    """Generate text from the prompt; empty if there is none."""
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
            reporting.sample_tokens,
            context_length=run.job.seq_length,
            seed=run.job.options.training.seed,
            vocab_size=vocabulary.vocab_size,
        )
    return vocabulary.decode(ids)


def generate(
    trained: Trained, prompt: Sequence[int], num_tokens: int, *, context_length: int, seed: int, vocab_size: int
) -> list[int]:
    """Generate `num_tokens` token ids below `vocab_size` that continue the prompt; collective, in evaluation mode.

    Nothing is added with an engine that gives no logits, and no more from where logits are not finite. The generator is
    the CPU's, so that every kind of device samples alike.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(num_tokens):
        found = trained.logits(torch.tensor([ids[-context_length:]]))
        if found is None:
            return ids
        logits = found[0, -1, :vocab_size].float().cpu()
        if not bool(torch.isfinite(logits).all()):  # weights that have run away; nothing can be drawn
            return ids
        probabilities = torch.softmax(logits / TEMPERATURE, dim=-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return ids


def save(
    folder: Path, job: Job, recorder: Recorder, outcome: Outcome, results: Results, say: Callable[[str], None]
) -> None:
    """Write summary and sample; report what cannot be written."""
    summary = {
        **applied(job),
        "progress": asdict(outcome.progress),
        "last_training_loss": recorder.records[-1].loss if recorder.records else None,
        "evaluations": [asdict(evaluation) for evaluation in recorder.evaluations],
        **asdict(results),
    }
    attempt("the sample", lambda: (folder / SAMPLE_FILE).write_text(results.sample, encoding="utf-8"), say)
    attempt("the summary", lambda: (folder / SUMMARY_FILE).write_text(to_json(summary, 2) + "\n"), say)


def attempt(what: str, work: Callable[[], object], say: Callable[[str], None]) -> None:
    """Write something that a run can do without; report why if it could not be written."""
    try:
        work()
    except (OSError, ConfigurationError) as error:
        say(f"{what} could not be written: {error}")


def show(console: Console, folder: Path, outcome: Outcome, results: Results) -> None:
    """Print the results."""
    done, say = outcome.progress, partial(print_message, console)
    perplexity = Evaluation(done.steps, results.held_out_loss).perplexity
    say(
        f"held-out loss {results.held_out_loss:.3f} nats per token, perplexity {perplexity:.2f}, "
        f"{results.bits_per_byte:.3f} bits per byte, after {done.steps} steps in {done.elapsed_s:.0f} s"
    )
    if results.sample:
        console.print(Panel(Text(printable(results.sample)), title="the model writes", expand=False))
    if results.rows:
        show_comparison(console, results.rows)
    say(f"peak memory per rank ({results.peak_meaning}): {', '.join(map(in_bytes, results.peaks_bytes))}")
    say(f"metrics, sample and summary: {folder}")
