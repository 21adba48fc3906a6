"""The presets among the examples: they resolve for their ranks, and their scripts start what they say."""

import json
import re
from pathlib import Path

import pytest

from megatron_fsdp.plan.machine import find_machine
from megatron_fsdp.train.options.checks import check_environment
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World
from megatron_fsdp.train.options.resolve import resolve

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "presets"
PRESETS = {path.stem: int(path.stem.rpartition("-")[2].removesuffix("gpu")) for path in FOLDER.glob("*.yaml")}
MACHINES = {"deepseek-v3-256gpu": "b200", "deepseek-v3-1024gpu": "h200"}
TOLD = {"--use-distributed-optimizer"}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_all_of_them_are_there() -> None:
    assert PRESETS == {
        "llama3-8b-8gpu": 8,
        "llama3-8b-64gpu": 64,
        "llama3-70b-64gpu": 64,
        "llama3-70b-256gpu": 256,
        "deepseek-v3-256gpu": 256,
        "deepseek-v3-1024gpu": 1024,
    }


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_without_surprises(name: str) -> None:
    path = Path("examples/presets") / f"{name}.yaml"
    world = World(PRESETS[name], "cuda")
    job = resolve(parse_options(["--config", str(path)]), world)
    assert {notice.split()[0].rstrip(":") for notice in job.notices} == TOLD
    assert job.batch.filled == 0
    assert (job.engine, job.ddp.data_parallel_sharding_strategy) == ("megatron_fsdp", "optim_grads_params")
    assert job.options.model.hf_config is not None
    assert json.loads(job.options.model.hf_config.read_text(encoding="utf-8"))["model_type"] in ("llama", "deepseek_v3")
    assert check_environment({}, job, world) == ()


@pytest.mark.parametrize("name", PRESETS)
def test_a_script_starts_its_preset_with_flags_that_are_taken(name: str) -> None:
    text = (FOLDER / f"sbatch_{name.replace('-', '_')}.sh").read_text(encoding="utf-8")
    nodes = int(re.findall(r"#SBATCH --nodes=(\d+)", text)[0])
    assert 8 * nodes == PRESETS[name]
    assert "\nunset CUDA_DEVICE_MAX_CONNECTIONS\n" in text
    words = text.partition("pretrain_gpt.py")[2].replace("\\\n", " ").replace('"', "").split()
    job = resolve(parse_options(words), World(PRESETS[name], "cuda"))
    assert job.load_is_optional
    assert words[:2] == ["--config", f"examples/presets/{name}.yaml"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_published_plan_of_a_preset_fits_its_machine(name: str) -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (cells,) = re.findall(rf"^\| \[{name}\]\(.*\) \| (.*) \|$", page, re.MULTILINE)
    gpus, _, peak, *_ = cells.split(" | ")
    machine = MACHINES.get(name, "h100")
    assert gpus == f"{PRESETS[name]:,} {machine.upper()}"
    planned, usable = peak.split(" of ")
    assert usable == f"{find_machine(machine).usable_bytes / 2**30:.2f}"
    assert float(planned) < float(usable)
