"""`mfsdp plan --config FILE`: the plan of what `mfsdp train --config FILE` would run."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fsdp.cli.main import main
from megatron_fsdp.cli.plan_config import planned_run
from megatron_fsdp.plan.setup import Accumulation
from tests.cli.test_plan import small_config

DECODER = (
    "preset: tiny\nglobal_batch_size: 48\nmicro_batch_size: 2\nnum_distributed_optimizer_instances: 2\n"
    "outer_dp_sharding_strategy: optim\nfsdp_double_buffer: true\n"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plan_has_what_the_trainer_would_run(tmp_path: Path) -> None:
    run = planned_run(written(tmp_path, DECODER), 8)
    setup = run.setup
    assert (setup.ranks.dp_shard, setup.ranks.dp_outer, setup.microbatches) == (4, 2, 3)
    assert (setup.strategy.name, setup.outer_strategy.name) == ("optim_grads_params", "optim")
    assert setup.memory.allocator.name == "DOUBLE_BUFFER"
    assert (setup.optimizer.name, setup.recompute) == ("adamw-fused", "none")
    assert run.workload.tokens == 2 * 64


def test_gradients_are_reduced_once_where_the_trainer_does_so(tmp_path: Path) -> None:
    path = written(tmp_path, "preset: tiny\nglobal_batch_size: 32\ndata_parallel_sharding_strategy: optim\n")
    assert planned_run(path, 2).setup.accumulation is Accumulation.LAST
    path = written(tmp_path, "preset: tiny\nglobal_batch_size: 32\n")
    assert planned_run(path, 2).setup.accumulation is Accumulation.EVERY


@pytest.mark.parametrize(
    ("said", "flags"),
    [("", "--microbatches 2"), ("pipeline_model_parallel_size: 2\n", "--microbatches 4 --pp 2")],
)
def test_a_config_and_the_same_said_by_flags_have_one_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, flags: str
) -> None:
    pytest.importorskip("transformers")
    model = small_config(tmp_path)
    path = written(
        tmp_path,
        f"hf_config: {model}/config.json\nseq_length: 128\nmicro_batch_size: 2\nglobal_batch_size: 16\n"
        "train_iters: 9\nlr: 0.1\nbf16: true\nuse_megatron_fsdp: true\n"
        "recompute_granularity: full\ngrad_reduce_in_bf16: true\n" + said,
    )

    def plan_of(*words: str) -> dict[str, Any]:
        assert main(["plan", *words, "--ranks", "4", "--machine", "a100", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    by_config = plan_of("--config", str(path))
    words = "--strategy 3 --sequence-length 128 --micro-batch-size 2 --recompute full"
    dtypes = "--main-grads-dtype fp32 --grad-comm-dtype bf16 --optimizer adamw-fused"
    by_flags = plan_of(model, *words.split(), *dtypes.split(), *flags.split())
    assert by_config["memory"] == by_flags["memory"]
    assert by_config["traffic_per_step"] == by_flags["traffic_per_step"]
    assert by_config["model"]["parameters"] == by_flags["model"]["parameters"]


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("preset: tiny\n", "--strategy 2", "--strategy contradicts --config, which says it"),
        ("preset: tiny\n", "llama-3-8b", "MODEL contradicts --config"),
        ("preset: tiny\n", "--ranks 0", "invalid --ranks 0: give 1 to"),
        ("preset: tiny\nuse_torch_fsdp2: true\n", "", "trains with FSDP2, which cannot be planned"),
        ("preset: tiny\nuse_megatron_fsdp: false\n", "", "trains with buckets, which cannot be planned"),
        ("preset: tiny\ndelay_wgrad_compute: true\n", "", "--delay-wgrad-compute cannot be planned"),
        ("preset: tiny\nhidden-sze: 3\n", "", "is no option; did you mean hidden_size?"),
        ("preset: tiny\ntokenizer_type: bpe\n", "", "does not say how many tokens there are"),
        (
            "preset: tiny\nrecompute_granularity: full\nrecompute_num_layers: 1\n",
            "",
            "--recompute-num-layers cannot be planned",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(
    text: str, words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config", str(written(tmp_path, text)), *words.split()]) == 2
    assert told in capsys.readouterr().err
