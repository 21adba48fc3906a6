"""`mfsdp plan` as a user types it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.cli.main import main
from megatron_fsdp.cli.plan import planned_run
from megatron_fsdp.plan.models import PRESETS
from tests.support.zoo import FLOOR_NUMEL, FLOORS, ROOT_NUMEL, TOWER_FEATURES

pytest.importorskip("transformers")

SMALL = ("llama-3.2-1b", "--ranks", "16", "--sequence-length", "1024")


def small_config(folder: Path, **more: Any) -> str:
    """A config.json of a tiny Llama."""
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def unfolded(text: str) -> str:
    """Return a text as one line, however it was folded."""
    return " ".join(text.replace(" \\\n", " ").split())


def test_json_says_what_the_tables_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["plan", small_config(tmp_path), "--ranks", "4", "--strategy", "3", "--sequence-length", "128"]
    assert main([*args, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    params = told["model"]["parameters"]
    assert params == 512 * 64 * 2 + 64 + 3 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64)
    held = told["memory"]["held"]
    padded = round(params * (1 + told["model"]["padding_fraction"]))
    assert params <= padded < 1.01 * params
    assert held["compute_weights"] == 2 * padded // 4
    assert held["main_weights"] == 4 * padded // 4
    assert held["total"] == sum(count for name, count in held.items() if name != "total")
    peak = told["memory"]["peak"]
    moments = told["timeline"]
    at_all_times = held["total"] - held["main_gradients"] + told["memory"]["inputs"]
    assert peak["total"] == at_all_times + max(each["total_bytes"] for each in moments)
    assert told["setup"]["strategy"] == "optim_grads_params"
    assert told["flags"][:3] == ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"]
    assert main(args) == 0
    text = unfolded(capsys.readouterr().out)
    assert f"{params:,} parameters" in text
    assert "It fits" in text
    assert "ranks 4: dp_shard 4" in text


def test_auto_tries_everything_and_marks_its_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--recompute", "full"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    marked = [line for line in lines if line.startswith("*")]
    tried = [line for line in lines if " full " in line and (line.startswith(("*", "   ")))]
    assert len(marked) == 1
    assert len(tried) == 6  # four flat strategies, two hybrid ones
    chosen = marked[0].split()[1]
    assert f"--data-parallel-sharding-strategy {chosen}" in unfolded(text)


def test_what_is_not_the_default_of_the_trainer_becomes_flags(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--strategy", "3", "--optimizer", "adamw8bit", "--dtype", "bfloat16", "--main-params-dtype", "bfloat16"]
    assert main(["plan", *SMALL, *asked, "--outer", "2", "--outer-strategy", "optim", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    hybrid = ["--num-distributed-optimizer-instances", "2", "--outer-dp-sharding-strategy", "optim"]
    chosen = ["--optimizer", "adamw8bit", "--megatron-fsdp-main-params-dtype", "bfloat16"]
    dtypes = ["--megatron-fsdp-main-grads-dtype", "auto", "--megatron-fsdp-grad-comm-dtype", "auto"]
    assert told["flags"][4:] == [*hybrid, "--bf16", *chosen, *dtypes]
    assert [axis["axis"] for axis in told["traffic_per_step"]] == ["dp_shard", "dp_outer"]


def test_weights_in_few_bits_send_and_hold_less(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Half the bytes of what has two dimensions and is no embedding; transposed codes are as many as gathered ones."""
    config = {**PRESETS["llama-3.2-1b"], "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    small = (str(tmp_path), *SMALL[1:])
    found = []
    for more in ([], ["fp8"], ["*norm*=none,*=fp8_compute"], ["fp8_compute", "--keep-fp8-transpose-cache"]):
        asked = ["plan", *small, "--strategy", "3", *(["--weight-format", *more] if more else [])]
        assert main([*asked, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    sent = [told["traffic_per_step"][0]["sent_bytes"] for told in found]
    gathered = [max(moment["gathered_bytes"] for moment in told["timeline"]) for told in found]
    assert sent[0] > sent[1] == sent[2] == sent[3]
    assert gathered[1] == pytest.approx(gathered[0], rel=0.01)  # decoded in a slot of the same size
    assert gathered[2] < 0.9 * gathered[1]  # what no linear multiplies stays as it is
    assert gathered[2] < gathered[3]
    assert [told["flags"][-6:-4] for told in found[1:]] == [
        ["--megatron-fsdp-weight-format", "*=fp8"],
        ["*norm*=none", "*=fp8_compute"],
        ["--fp8-param-gather", "--keep-fp8-transpose-cache"],
    ]
    assert main(["plan", *small, "--weight-format", "fp8"]) == 0
    assert "gathered as fp8 (*)" in capsys.readouterr().out
    assert main(["plan", *small, "--strategy", "2", "--weight-format", "fp8"]) == 2
    assert "is a format of sharded weights, and strategy optim_grads keeps them whole" in capsys.readouterr().err
    assert main(["plan", *small, "--strategy", "3", "--weight-format", "=fp8"]) == 2
    assert "weight format '=fp8' has no pattern before '='" in capsys.readouterr().err
    by_name = ["--strategy", "3", "--weight-format", "*norm*=none,*=fp8_compute", "--keep-fp8-transpose-cache"]
    assert main(["plan", *small, *by_name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["flags"][-6:-4] == ["*norm*=none", "*=fp8_compute"]
    assert any("fully_shard(keep_fp8_transpose_cache=True) keeps these" in note for note in told["workload"]["notes"])


def rows() -> torch.Tensor:
    """A microbatch of the tower's."""
    return torch.zeros(7, TOWER_FEATURES)


def square(output: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return output.square().mean()


def test_any_model_is_planned_with_inputs_and_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    here = __name__
    args = ["plan", "tests.support.zoo:Tower", "--inputs", f"{here}:rows", "--ranks", "4", "--strategy", "3"]
    assert main([*args, "--loss", f"{here}:square", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["workload"]["tokens_per_rank_and_microbatch"] == 7
    assert told["memory"]["inputs"] == 7 * TOWER_FEATURES * 4
    assert told["memory"]["held"]["compute_weights"] == 4 * (ROOT_NUMEL + FLOORS * FLOOR_NUMEL) // 4
    assert main([*args, "--loss", f"{here}:cube"]) == 2
    assert "--loss has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "no model was given"),
        (("llama-3-9b",), "did you mean 'llama-3-8b'"),
        ((*SMALL, "--tp", "3"), "--ranks 16 is not a multiple of"),
        (("cpu-small", "--loss", "torch.sum"), "cpu-small has inputs and a loss of its own: leave --inputs and --loss"),
        ((*SMALL, "--strategy", "fsdp"), "--strategy='fsdp' is not a sharding strategy"),
        ((*SMALL, "--machine-set", "flops"), "--machine-set flops is not FIGURE=NUMBER"),
        ((*SMALL, "--offload", "main_weights=half"), "give kinds of main_weights, optimizer_state"),
        ((*SMALL, "--memory", "24 cards"), "--memory 24 cards is no size; give bytes, or a number with GB or GiB"),
        ((*SMALL, "--outer", "2"), "tried by themselves with --strategy auto"),
        ((*SMALL, "--strategy", "3", "--outer", "0"), "is not a multiple of tp x cp x pp x outer"),
        (("no.such.module:model",), "no.such.module"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_bad_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: str
) -> None:
    assert main(["plan", *args]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_other_axes_are_planned_by_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", *SMALL, "--tp", "2", "--pp", "2", "--microbatches", "4", "--strategy", "2", "--json"]

    def told(*more: str) -> dict[str, Any]:
        assert main([*args, *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    plain = told()
    assert [axis["axis"] for axis in plain["traffic_per_step"]] == ["dp_shard", "tp", "pp"]
    kept = [each["memory"]["activations_kept_for_backward"] for each in (plain, told("--no-sequence-parallel"))]
    assert kept[0] < kept[1]
    reductions = [each["traffic_per_step"][0]["reductions"] for each in (plain, told("--accumulation", "last"))]
    assert reductions[0] == 4 * reductions[1]
    assert told("--overlap-exchanges")["time"]["step_s"] < plain["time"]["step_s"]
    assert told("--virtual-stages", "2")["time"]["step_s"] < plain["time"]["step_s"]
    assert told("--fp8")["time"]["step_s"] < plain["time"]["step_s"]


def test_where_nothing_fits_the_advice_is_how_many_ranks_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = ["--machine-set", "memory_bytes=1.1e6", "--machine-set", "reserved_bytes=0"]
    machine += ["--machine-set", "host_memory_bytes=1"]
    args = ["plan", small_config(tmp_path), "--sequence-length", "16", *machine]
    assert main([*args, "--ranks", "2"]) == 1
    assert "use more ranks (about 8 with every rank holding a share)" in unfolded(capsys.readouterr().out)
    assert main([*args, "--ranks", "8"]) == 0


# ---- what `mfsdp train --config FILE` would run ----------------------------------------------------------------------

DECODER = (
    "preset: tiny\nglobal_batch_size: 48\nmicro_batch_size: 2\nnum_distributed_optimizer_instances: 2\n"
    "outer_dp_sharding_strategy: optim\nfsdp_double_buffer: true\n"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plan_has_what_the_trainer_would_run(tmp_path: Path) -> None:
    workload, setup, _ = planned_run(written(tmp_path, DECODER), 8)
    assert (setup.ranks.dp_shard, setup.ranks.dp_outer, setup.microbatches) == (4, 2, 3)
    assert (setup.strategy.name, setup.outer_strategy.name) == ("optim_grads_params", "optim")
    assert setup.memory.allocator.name == "DOUBLE_BUFFER"
    assert (setup.optimizer.name, setup.recompute) == ("adamw-fused", "none")
    assert workload.tokens == 2 * 64


@pytest.mark.parametrize(
    ("said", "accumulation"),
    [
        ("data_parallel_sharding_strategy: optim\n", "last"),
        ("data_parallel_sharding_strategy: optim\ndeterministic: world\n", "every"),
        ("", "every"),
    ],
)
def test_gradients_are_reduced_once_where_the_trainer_does_so(tmp_path: Path, said: str, accumulation: str) -> None:
    path = written(tmp_path, f"preset: tiny\nglobal_batch_size: 32\n{said}")
    assert planned_run(path, 2)[1].accumulation == accumulation


SHORT = [
    "--strategy 3 --outer 2 --outer-strategy optim --main-params-dtype auto --weight-format fp8",
    "--strategy 3 --offload main_weights=0.5,compute_weights --main-grads-dtype fp32",
]


@pytest.mark.full(short=SHORT)
@pytest.mark.parametrize(
    "asked",
    [
        "--strategy 1 --main-grads-dtype fp32",
        "--strategy 3 --main-grads-dtype bf16 --grad-comm-dtype fp32 --recompute full",
        "--strategy 3 --outer 2 --outer-strategy optim --main-params-dtype auto --weight-format fp8",
        "--strategy 3 --offload main_weights=0.5,compute_weights --main-grads-dtype fp32",
        "--strategy 3 --dtype fp32 --optimizer adamw8bit",
        "--strategy 2 --tp 2 --outer-strategy no_shard",
    ],
)
def test_the_flags_of_a_plan_give_that_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str) -> None:
    model, words = small_config(tmp_path), asked.split()
    words += [] if "--optimizer" in words else ["--optimizer", "adamw-fused"]
    batch = ["--sequence-length", "128", "--micro-batch-size", "2"]
    assert main(["plan", model, "--ranks", "4", *batch, *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["without_flags"] == []
    count = 4 // (2 if "--tp" in words else 1)
    text = f"hf_config: {model}/config.json\nseq_length: 128\nmicro_batch_size: 2\nglobal_batch_size: {2 * count}\n"
    text += "train_iters: 9\nlr: 0.1\n"
    values: dict[str, list[str]] = {}
    for word in told["flags"]:
        if word.startswith("--"):
            values[name := word[2:].replace("-", "_")] = []
        else:
            values[name].append(word)
    for name, given in values.items():
        is_list = len(given) > 1 or name.endswith(("format", "_offload"))
        text += f"{name}: {json.dumps(given if is_list else given[0]) if given else 'true'}\n"
    assert main(["plan", "--config", str(written(tmp_path, text)), "--ranks", "4", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["memory"] == told["memory"]
    assert again["traffic_per_step"] == told["traffic_per_step"]
    assert again["flags"] == told["flags"]


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("preset: tiny\n", "--strategy 2", "--strategy contradicts --config, which says it"),
        ("preset: tiny\n", "llama-3-8b", "MODEL contradicts --config"),
        ("preset: tiny\nuse_torch_fsdp2: true\n", "", "trains with FSDP2, which cannot be planned"),
        ("preset: tiny\nuse_megatron_fsdp: false\n", "", "trains with buckets, which cannot be planned"),
        ("preset: tiny\ndelay_wgrad_compute: true\n", "", "--delay-wgrad-compute, which cannot be planned: it keeps"),
        (
            "preset: tiny\nuse_megatron_fsdp: true\ndata_parallel_sharding_strategy_experts: optim\n",
            "",
            "--data-parallel-sharding-strategy-experts, which cannot be planned: plan one strategy",
        ),
        ("preset: tiny\ntokenizer_type: bpe\n", "", "does not say how many tokens there are"),
        (
            "preset: tiny\nrecompute_granularity: full\nrecompute_num_layers: 1\n",
            "",
            "--recompute-num-layers, which cannot be planned: plan all",
        ),
    ],
)
def test_configs_that_cannot_be_planned_are_refused(
    text: str, words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config", str(written(tmp_path, text)), *words.split()]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["plan", *SMALL, "--units"], ["describe", "--model", "tests.support.zoo:Tower", "--ranks", "8"]]
)
def test_lines_fit_the_terminal(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command) == 0
    assert 60 < max(map(len, capsys.readouterr().out.splitlines())) <= 80
