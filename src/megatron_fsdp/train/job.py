"""One training run from start to end, on one rank."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from megatron_fsdp.train.arguments import Settings
from megatron_fsdp.train.build import build
from megatron_fsdp.train.checkpoints import RunCheckpoints
from megatron_fsdp.train.comparison import Measurement, Plan, Row, compare
from megatron_fsdp.train.console import (
    ConsoleWatcher,
    format_bytes,
    library_messages,
    make_console,
    show_comparison,
    show_header,
)
from megatron_fsdp.train.data import TokenSets
from megatron_fsdp.train.generate import generate
from megatron_fsdp.train.loop import FINAL_SAMPLES, Outcome, Run, evaluate, evaluating, train
from megatron_fsdp.train.metrics import Evaluation
from megatron_fsdp.train.plot import plot_losses
from megatron_fsdp.train.preparation import prepare
from megatron_fsdp.train.presets import model_shape
from megatron_fsdp.train.ranks import Rank, gather_values
from megatron_fsdp.train.readings import (
    describe_peak,
    exchanges_pairwise,
    optimizer_bytes,
    peak_bytes,
)
from megatron_fsdp.train.recorder import Recorder
from megatron_fsdp.train.vocabulary import Vocabulary

SAMPLE_TOKENS = 300
TEMPERATURE = 0.7
CURVE_FILE = "loss.png"
SUMMARY_FILE = "summary.json"
SAMPLE_FILE = "sample.txt"


@dataclass(frozen=True)
class Results:
    """What a finished run has to show.

    Attributes:
        held_out_loss: Mean on held-out text, in nats per token.
        bits_per_byte: The same in bits per byte of text, which does not depend on the tokenizer.
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


def run_job(settings: Settings, rank: Rank) -> None:
    """Prepare, train, and show the results; a run that was interrupted saves and shows none.

    Raises:
        CheckpointError: On every rank, for a checkpoint that cannot be loaded or saved.
        ConfigurationError: On every rank, for what is wrong with the data or the folder.
    """
    console, options = make_console(is_first=rank.is_first), settings.arguments.checkpoints
    with console.status("reading text ..."):
        folder, vocabulary, tokens = prepare(settings, rank)
    show_header(console, describe(settings, rank, vocabulary, tokens, folder))
    with library_messages(console):
        model, optimizer = build(settings, vocabulary.vocab_size, rank)
        run = Run(model, optimizer, settings, tokens, rank)
        with ConsoleWatcher(console, settings.preset.steps) as display, RunCheckpoints(run, display.say) as keeper:
            recorder = Recorder(display, folder if rank.is_first else None)
            outcome = train(run, recorder, keeper)
        if keeper.is_finished:
            return
        if outcome.is_interrupted:
            console.print(f"stopped and saved after {outcome.steps} steps; --load {options.save} goes on from there")
            return
        with console.status("measuring held-out loss and writing a sample ..."):
            results = conclude(run, vocabulary, outcome)
    recorder.evaluations[-1] = Evaluation(outcome.steps, results.held_out_loss)  # measured on more text than before
    if rank.is_first:
        save(folder, settings, recorder, outcome, results)
    show(console, folder, outcome, results)


def describe(
    settings: Settings, rank: Rank, vocabulary: Vocabulary, tokens: TokenSets, folder: Path
) -> list[tuple[str, str]]:
    """Return what the header says."""
    shape, preset, arguments = model_shape(settings.preset, vocabulary.vocab_size), settings.preset, settings.arguments
    model = f"{shape.num_layers} blocks of width {shape.dim}, {shape.parameter_numel:,} parameters"
    samples = preset.batch_size * rank.count * arguments.grad_accumulation
    return [
        ("model", f"{arguments.preset}: {model}"),
        ("ranks", f"{rank.count} on {rank.device.type}"),
        ("strategy", f"{settings.strategy.name} ({settings.strategy.value})"),
        ("dtype", f"{str(settings.dtype).removeprefix('torch.')}, float32 main weights and gradients"),
        ("text", arguments.data or "source of the Python standard library"),
        ("tokens", f"{len(tokens.training):,} to train on, {len(tokens.held_out):,} held out ({arguments.tokenizer})"),
        ("step", f"{samples} samples of {preset.sequence_length} tokens, {preset.steps} steps"),
        ("results", str(folder)),
    ]


def conclude(run: Run, vocabulary: Vocabulary, outcome: Outcome) -> Results:
    """Measure and sample after training; all ranks take part."""
    loss = evaluate(run, FINAL_SAMPLES)
    arguments = run.settings.arguments
    with evaluating(run.model):
        ids = generate(
            run.model,
            vocabulary.encode([arguments.prompt])[:-1].tolist(),  # without the end of the text
            num_tokens=SAMPLE_TOKENS,
            context_length=run.settings.preset.sequence_length,
            temperature=TEMPERATURE,
            seed=arguments.seed,
        )
    measured = Measurement(run.model.memory(), optimizer_bytes(run.optimizer), outcome.step_counters)
    plan = Plan(
        run.model.footprints(),
        run.settings.strategy,
        microbatches=arguments.grad_accumulation,
        exchanges_pairwise=exchanges_pairwise(run.model),
    )
    rows = compare(measured, plan)
    peaks = gather_values(run.rank, peak_bytes(run.model, run.optimizer, run.rank.device))
    bits = loss / math.log(2) * len(run.tokens.held_out) / run.tokens.held_out_bytes
    return Results(loss, bits, vocabulary.decode(ids), rows, tuple(peaks), describe_peak(run.rank.device))


def save(folder: Path, settings: Settings, recorder: Recorder, outcome: Outcome, results: Results) -> None:
    """Write summary, sample and loss curve."""
    title = f"{settings.arguments.preset}, {settings.strategy.name}, {str(settings.dtype).removeprefix('torch.')}"
    plot_losses(folder / CURVE_FILE, recorder.records, recorder.evaluations, title)
    (folder / SAMPLE_FILE).write_text(results.sample, encoding="utf-8")
    summary = {
        "arguments": asdict(settings.arguments),
        "preset": asdict(settings.preset),
        "strategy": settings.strategy.name,
        "dtype": str(settings.dtype),
        "steps": outcome.steps,
        "elapsed_s": outcome.elapsed_s,
        "last_training_loss": recorder.records[-1].loss,
        "evaluations": [asdict(evaluation) for evaluation in recorder.evaluations],
        **asdict(results),
    }
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2, default=str), encoding="utf-8")


def show(console: Console, folder: Path, outcome: Outcome, results: Results) -> None:
    """Print the results."""
    perplexity = math.exp(results.held_out_loss)
    console.print(
        f"held-out loss {results.held_out_loss:.3f} nats per token, perplexity {perplexity:.2f}, "
        f"{results.bits_per_byte:.3f} bits per byte, after {outcome.steps} steps in {outcome.elapsed_s:.0f} s"
    )
    console.print(Panel(Text(results.sample), title="the model writes", expand=False))
    show_comparison(console, results.rows)
    console.print(f"peak memory per rank ({results.peak_meaning}): {', '.join(map(format_bytes, results.peaks_bytes))}")
    console.print(f"loss curve, metrics, sample and summary: {folder}")
