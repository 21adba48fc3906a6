"""What an installation without the extras says: one line with the package and what brings it, for every command."""

import json
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement

from megatron_fsdp.optional_packages import EXTRAS
from megatron_fsdp.plan.models import PRESETS as MODELS
from megatron_fsdp.train.options.command_line import PRESETS
from tests.support.source_tree import ROOT, python_files, short_name
from tests.support.train_program import environment

# Takes from standard input a list of [modules to hide, calls], and gives [status, last line of stderr] for each call.
CHILD = """
import io, json, sys, traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib.machinery import PathFinder
hidden = set()
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
def call(words):
    from megatron_fsdp.cli.main import main
    if words[0] != "python":
        return main(words)
    try:
        exec(words[1], {})
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
found = []
for names, calls in json.load(sys.stdin):
    hidden.clear()
    hidden.update(names)
    for words in calls:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
            try:
                code = call(words)
            except SystemExit as ended:
                code = ended.code
            except BaseException:
                code = traceback.format_exc()
        found.append([code, (errors.getvalue().splitlines() or [""])[-1]])
print(json.dumps(found))
"""

COMMANDS = ("plan", "doctor", "describe", "trace", "hang", "checkpoint")
OF_CHECKPOINTS = {
    "verify": 1, "inspect": 1, "show": 2, "map": 1, "diff": 2, "convert": 2
}  # fmt: skip
FROM_CHECKOUT = "which is not installed; run pip install -e '.[{}]' in the checkout of mfsdp"
HF = f"the package transformers, {FROM_CHECKOUT.format('hf')}"
TOKENIZERS = f"the package tokenizers, {FROM_CHECKOUT.format('train')}"
MODEL = f"a model of this config needs {HF}, or give an import path 'package.module:function' that builds the model"

EVERYTHING = [*(name for packages in EXTRAS.values() for name in packages), "peft", "huggingface_hub"]
WITHOUT_ANYTHING: dict[tuple[str, ...], str | None] = {
    ("--help",): None,
    **{(command, "--help"): None for command in COMMANDS},
    **{("checkpoint", name, "--help"): None for name in OF_CHECKPOINTS},
    **{("checkpoint", name, *["nowhere"] * count): "nowhere" for name, count in OF_CHECKPOINTS.items()},
    ("checkpoint", "convert", "nowhere", "out", "--verify"): "nowhere is not a folder",
    ("trace", "nowhere"): "nowhere is not a folder",
    ("hang", "nowhere"): "nowhere is not a folder",
    ("doctor", "some:model", "--batch", "some:batch", "--ranks", "1"): "No module named 'some'",
    **{("train", "--preset", name): f"the trainer needs {TOKENIZERS}" for name in list(PRESETS)[:1]},
    ("train", "--help"): f"the trainer needs {TOKENIZERS}",
    **{("plan", name): MODEL for name in list(MODELS)[:2]},
    ("describe", "--model", "gpt2", "--ranks", "2"): MODEL,
    ("plan", "cpu-small"): None,  # the trainer's own decoder
    ("python", "from megatron_fsdp import fully_shard, DistributedDataParallel"): None,
    ("python", "from megatron_fsdp.automodel import FSDP2Config"): f"megatron_fsdp.automodel needs {HF}",
}
WITHOUT_HF: dict[tuple[str, ...], str | None] = {
    ("train", "--preset", "tiny", "--transformer-impl", "transformers"): f"--transformer-impl transformers needs {HF}",
    ("train", "--preset", "tiny", "--use-torch-fsdp2"): f"--use-torch-fsdp2 needs {HF}",
    ("train", "--preset", "tiny", "--hf-config", "{here}"): f"--hf-config needs {HF}",
    ("doctor", "--hf-config", "{here}"): f"needs {HF}",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[Any]]:
    """The status of each call, and the last line that it wrote to standard error."""
    here = tmp_path_factory.mktemp("here")
    (here / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    phases = [(EVERYTHING, WITHOUT_ANYTHING), (["transformers", "peft"], WITHOUT_HF)]
    asked = [
        (hidden, [[word.format(here=here) for word in words] for words in expected]) for hidden, expected in phases
    ]
    ended = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(asked),
        cwd=here,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found = iter(json.loads(ended.stdout.splitlines()[-1]))
    return {words: next(found) for _, expected in phases for words in expected}


@pytest.mark.parametrize("words", [*WITHOUT_ANYTHING, *WITHOUT_HF], ids=" ".join)
def test_what_is_missing_is_named_in_one_line(
    answers: dict[tuple[str, ...], list[Any]], words: tuple[str, ...]
) -> None:
    code, line = answers[words]
    told = {**WITHOUT_ANYTHING, **WITHOUT_HF}[words]
    if told is None:
        assert code == 0, line
    else:
        assert (code, told in line) == (2, True), line


def test_extras_and_oldest_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, packages in EXTRAS.items():
        demanded = map(Requirement, project["optional-dependencies"][extra])
        assert {each.name: str(each.specifier) for each in demanded} == {n: f">={v}" for n, v in packages.items()}
    assert "numpy" in {Requirement(each).name for each in project["dependencies"]}


def test_no_hint_installs_the_package_of_another_publisher() -> None:
    """On the package index the name of this distribution is NVIDIA's."""
    hint = re.compile(r"pip install [^\n]*megatron[-_]fsdp\b")
    texts = [*python_files("src", "examples", "tools"), *(ROOT / "docs").glob("*.md")]
    found = {short_name(path): hint.findall(path.read_text(encoding="utf-8")) for path in texts}
    assert [(name, lines) for name, lines in found.items() if any("-e '.[" not in line for line in lines)] == []
