"""Write the generated parts of pages (listings, tables, diffs, pictures) and the generated pages.

    make pages                                    # bring all pages up to date
    make pages ARGS="plan.md --check"             # name what differs, write nothing; exit status 1 if anything does

A page marks a generated part so, and the tool writes what is between the two lines:

    <!-- generated: mfsdp plan llama-3-8b --ranks 8 -->     a command and its output, beside the page's programs
    <!-- generated: table exit_codes -->                    a table of `TABLES`
    <!-- generated: diff ddp -->                            how a script of examples/coming_from changes
    <!-- generated: picture plan -->                        a picture of `PICTURES`, also written
    <!-- end -->
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import published, published_scale
from benchmarks.page import SCALE, render, render_tables, summary_table, table
from benchmarks.page import TABLES as ALL_MEASURED
from benchmarks.scale import render as render_scale
from megatron_fsdp.cli.main import main as mfsdp
from megatron_fsdp.optim.full_tensor.exchange import assign_owners
from megatron_fsdp.plan import plan
from megatron_fsdp.plan.models import build_meta_model
from megatron_fsdp.plan.sharded import muon_matrices, single_matrices
from megatron_fsdp.train.failures import ENDS
from tools import (
    accumulation_costs,
    ddp_config_table,
    one_curve,
    optimizer_curves,
    padding_table,
    precision_parity,
    training_flags_table,
)
from tools.on_ranks import on_ranks
from tools.performance_picture import draw_performance
from tools.plan_picture import draw_memory
from tools.published_runs import COLUMNS, PUBLISHED, published_row

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), ROOT / ALL_MEASURED, (ROOT / SCALE).with_suffix(".md"))

PROGRAM = re.compile(r"^ *```python(?: title=\"(?P<title>[\w.]+)\")?\n(?P<code>.*?)^ *```", re.MULTILINE | re.DOTALL)
"""A Python block of a page; those with a title are programs."""
GENERATED = re.compile(
    r"^(?P<indent> *)<!-- generated: (?P<asked>.+?) -->\n(?P<text>.*?)^ *<!-- end -->\n", re.MULTILINE | re.DOTALL
)
"""A generated part of a page, with its markers."""


@dataclass(frozen=True)
class Block:
    """A generated part of a page."""

    page: Path
    asked: str  # what generates it, as the marker says
    text: str  # what stands there, without the markers and their indentation

    def generate(self) -> str:
        """Return the block's new text."""
        kind, _, rest = self.asked.partition(" ")
        if kind == "mfsdp":
            made = _listing(self.asked, programs_of(self.page))
        elif kind == "diff":
            made = f"```diff\n{diff_of(rest)}```"
        elif kind == "picture":
            made = f"![{PICTURES[rest].caption}](images/{rest}.png)"
        else:
            made = TABLES[rest]()
        return "\n".join(line.rstrip() for line in made.splitlines())


def programs_of(page: Path) -> dict[str, str]:
    """Return the programs of a page by their titles."""
    return {found["title"]: found["code"] for found in PROGRAM.finditer(page.read_text("utf-8")) if found["title"]}


def blocks_of(page: Path) -> list[Block]:
    """Return the generated parts of a page."""
    return [
        Block(page, found["asked"], textwrap.dedent(found["text"]).strip("\n"))
        for found in GENERATED.finditer(page.read_text("utf-8"))
    ]


def brought_up_to_date(page: Path) -> str:
    """Return a page's text with its generated parts brought up to date."""

    def generated(found: re.Match[str]) -> str:
        asked = found["asked"]
        text = f"<!-- generated: {asked} -->\n\n{Block(page, asked, '').generate()}\n\n<!-- end -->\n"
        return textwrap.indent(text, found["indent"])

    return GENERATED.sub(generated, page.read_text("utf-8"))


# ---- commands --------------------------------------------------------------------------------------------------------


def _listing(command: str, programs: dict[str, str]) -> str:
    """Run a command in a folder with `programs` and the examples; return it and its output, as a block."""
    with tempfile.TemporaryDirectory() as folder:
        for name, code in programs.items():
            Path(folder, name).write_text(code, encoding="utf-8")
        for name in ("examples", "benchmarks"):
            Path(folder, name).symlink_to(ROOT / name)
        words = shlex.split(command)[1:]
        printed = _in_a_process(words, folder) if words[0] == "doctor" else _in_this_process(words, folder)
    return f"```text\n$ {command}\n{printed.rstrip()}\n```"


def _in_this_process(words: list[str], folder: str) -> str:
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        mfsdp(words)
    return printed.getvalue()


def _in_a_process(words: list[str], folder: str) -> str:
    """Run a command that starts ranks, which import the programs anew."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_fsdp.cli", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return ended.stdout


def diff_of(origin: str) -> str:
    """Return `diff -u` of the scripts before and after, with a line of context."""
    before, after = (f"examples/coming_from/{origin}_{moment}.py" for moment in ("before", "after"))
    old, new = ((ROOT / name).read_text("utf-8").splitlines(keepends=True) for name in (before, after))
    return "".join(difflib.unified_diff(old, new, before, after, n=1))


# ---- tables ----------------------------------------------------------------------------------------------------------


def exit_codes() -> str:
    """Return the table of the trainer's exit codes."""
    return table(("code", "what happened"), [(str(code), told) for code, told in ENDS.items()])


_MODELS = {
    "Llama-3 8B": "llama-3-8b",
    "Llama-3 70B": "llama-3-70b",
    "DeepSeek-V3": "deepseek-v3",
    "Kimi K2": "kimi-k2",
}
BALANCED_RANKS = (8, 64, 128, 256, 512, 1024)


def balance_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each model: name, matrices, and their balance for each number of ranks."""
    for name, preset in _MODELS.items():
        flops, numels = single_matrices(muon_matrices(build_meta_model(preset)).values())
        yield (name, f"{len(flops):,}", *(balance(flops, numels, ranks) for ranks in BALANCED_RANKS))


def balance(flops: list[int], numels: list[int], ranks: int) -> str:
    """Return the busiest rank's work and bytes sent over the mean, as "2.11* / 1.58".

    A star: whole matrices cannot be shared better, as somebody has the costliest, or two of the n + 1 costliest, or ...
    Bytes are operands, of which all send alike, and owners' results.
    """
    loads, owned = [0] * ranks, [0] * ranks
    for owner, numel in zip(assign_owners(flops, loads), numels, strict=True):
        owned[owner] += numel
    least = max(count * cost for count, cost in enumerate(sorted(flops, reverse=True)[::ranks], 1))
    sent = (1 + max(owned) * ranks / sum(owned)) / 2
    return f"{max(loads) * ranks / sum(loads):.2f}{'*' * (max(loads) == least)} / {sent:.2f}"


def muon_balance() -> str:
    """Return the table of the balance of Muon's iteration."""
    head = ("model", "matrices", *(f"{ranks:,} ranks" for ranks in BALANCED_RANKS))
    return table(head, list(balance_rows()))


def published_runs() -> str:
    """Return the table of published measurements beside their plans."""
    return table(COLUMNS, [published_row(run) for run in PUBLISHED])


def strategy_costs() -> str:
    """Return the table of each strategy's memory and traffic for Llama 3 8B on 8 ranks."""
    plans = [_plan("llama-3-8b", "--ranks", "8", "--machine", "h100", "--strategy", name) for name in "0123"]
    rows = [
        (f"{title}, GiB", *(f"{read(plan) / _GIB:.2f}" for plan in plans))  # type: ignore[no-untyped-call]
        for title, read in (
            ("compute weights", lambda plan: plan["memory"]["held"]["compute_weights"]),
            ("main weights", lambda plan: plan["memory"]["held"]["main_weights"]),
            ("main gradients", lambda plan: plan["memory"]["held"]["main_gradients"]),
            ("optimizer state", lambda plan: plan["memory"]["held"]["optimizer"]),
            ("peak, with activations and buffers", lambda plan: plan["memory"]["peak"]["total"]),
            ("sent by a rank per step", lambda plan: plan["traffic_per_step"][0]["sent_bytes"]),
        )
    ]
    return table(("", *(f"strategy {name}" for name in "0123")), rows)


def preset_plans() -> str:
    """Return the table of plans of examples/presets."""
    rows = []
    for name, ranks, machine in PRESETS:
        words = ("--config", f"examples/presets/{name}.yaml", "--ranks", str(ranks), "--machine", machine)
        plan = _plan(*words)
        memory, time, sizes = plan["memory"], plan["time"], plan["setup"]["ranks"]
        outer = f" x dp_outer {sizes['dp_outer']}" if sizes["dp_outer"] > 1 else ""
        outer += f", ep {sizes['ep']}" if sizes["ep"] > 1 else ""
        held = f"{memory['peak']['total'] / _GIB:.2f} of {memory['usable'] / _GIB:.2f}"
        times = (f"{time['step_s']:.2f}", f"{time['exposed_fraction']:.1%}", f"{time['model_flops_utilisation']:.1%}")
        link = f"[{name}](../examples/presets/{name}.yaml)"
        rows.append((link, f"{ranks:,} {machine.upper()}", f"dp_shard {sizes['dp_shard']}{outer}", held, *times))
    return table(("preset", "GPUs", "ranks", "peak, GiB", "step, s", "exposed", "utilisation"), rows)


def _plan(*words: str) -> Any:
    return json.loads(_in_this_process(["plan", *words, "--json"], str(ROOT)))


_GIB = 2**30
PRESETS = (
    ("llama3-8b-8gpu", 8, "h100"),
    ("llama3-8b-64gpu", 64, "h100"),
    ("llama3-70b-64gpu", 64, "h100"),
    ("llama3-70b-256gpu", 256, "h100"),
    ("deepseek-v3-256gpu", 256, "b200"),
    ("deepseek-v3-1024gpu", 1024, "h200"),
)
"""The configurations in examples/presets, with their ranks and machine."""


TABLES: dict[str, Callable[[], str]] = {
    **training_flags_table.TABLES,
    "accumulation": lambda: str(on_ranks(2, accumulation_costs.measured_table)),
    "ddp_defaults": ddp_config_table.different_defaults,
    "ddp_fields": ddp_config_table.fields,
    "exit_codes": exit_codes,
    "muon_balance": muon_balance,
    "optimizer_band": lambda: optimizer_curves.optimizer_bands(optimizer_curves.published()),
    "format_band": lambda: optimizer_curves.format_bands(optimizer_curves.published()),
    "optimizer_rates": lambda: optimizer_curves.rate_table(optimizer_curves.published()),
    "padding": padding_table.render,
    "precision_losses": lambda: precision_parity.gap_table(precision_parity.published()),
    "precision_stages": precision_parity.stage_table,
    "presets": preset_plans,
    "published_runs": published_runs,
    "speeds": lambda: summary_table(published()),
    "strategy_costs": strategy_costs,
}

SLOW = ("table accumulation", "table presets", "table published_runs", "table strategy_costs", "mfsdp doctor")
"""Beginnings of requests that take more than a few seconds."""


# ---- pictures, whole pages -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A picture in docs/images."""

    caption: str
    draw: Callable[[Path], object]


PICTURES = {
    "optimizers": Picture(
        "Loss of the tiny model under AdamW and under Muon, over 2,000 steps",
        lambda path: optimizer_curves.plot(path, optimizer_curves.published()),
    ),
    "weight_formats": Picture(
        "Gap of the loss with rounded weights to exact ones, over 2,000 steps",
        lambda path: optimizer_curves.plot_formats(path, optimizer_curves.published()),
    ),
    "plan": Picture(
        "Memory of one rank over a step, planned",
        lambda path: draw_memory(plan("llama-3-70b", 256, sequence_length=8192, recompute="full"), path),
    ),
    "one_curve": Picture(
        "Training loss of five runs over 1,000 steps: one curve",
        lambda path: one_curve.plot(path, one_curve.published()),
    ),
    "performance": Picture(
        "Step time and peak memory beside FSDP2 and DDP",
        lambda path: draw_performance(published(), path),
    ),
    "precision_parity": Picture(
        "Gap of the loss to the reference, over 50 steps",
        lambda path: precision_parity.plot(path, precision_parity.published()),
    ),
}

WHOLE: dict[str, Callable[[], str]] = {
    "performance.md": lambda: render(published(), published_scale()),
    "scale.md": lambda: render_scale(published_scale()),
    Path(ALL_MEASURED).name: lambda: render_tables(published()),
}
"""Pages that are generated as a whole."""


def contents_of(page: Path) -> str:
    """Return a page's new text."""
    return WHOLE[page.name]() if page.name in WHOLE else brought_up_to_date(page)


def main() -> int:
    """Bring pages and pictures up to date, or name the differing ones; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="file names, such as plan.md; all without any")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if anything differs")
    given = parser.parse_args()
    os.environ["MFSDP_MESSAGE_BYTES"] = "0"  # as in the tests that compare pages with what they say
    differing = []
    for page in (page for page in PAGES if not given.pages or page.name in given.pages):
        contents = contents_of(page)
        if contents != page.read_text("utf-8"):
            differing.append(page.name)
            if not given.check:
                page.write_text(contents, encoding="utf-8")
    if not given.pages and not given.check:
        for name, picture in PICTURES.items():
            picture.draw(IMAGES / f"{name}.png")
    print(f"{'differ' if given.check else 'changed'}: {', '.join(differing) or 'none'}")
    return int(given.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
