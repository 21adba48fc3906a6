"""Defaults, a preset, a configuration file and flags: who wins, what a file may say, and where each value came from."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options import Options
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World, resolve
from tests.support import on_ranks

refusal = partial(on_ranks.refusal, error=ConfigurationError)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def written(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return written


def read(path: Path, words: str = "") -> Options:
    return parse_options(["--config", str(path), *words.split()])


def test_a_path_is_one_of_the_current_folder_or_lies_beside_the_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("model: {hf_config: models/a.json}\nsave: saved\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.json").write_text("{}")
    assert read(path).model.hf_config == Path("models/a.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    options = read(path)
    assert (options.model.hf_config, options.checkpoint.save) == (tmp_path / "models" / "a.json", Path("saved"))


def test_later_layers_win_and_origins_are_told(write: Write) -> None:
    path = write("preset: tiny\nlr: 0.1\nseed: 5\n")
    options = read(path, "--seed 6")
    assert (options.optimizer.lr, options.training.seed, options.model.hidden_size) == (0.1, 6, 64)
    assert options.optimizer.clip_grad == 1.0
    origins = options.origins
    assert (origins["lr"], origins["seed"]) == (f"config {path}", "command line")
    assert origins["hidden_size"] == "preset tiny"
    assert "clip_grad" not in origins


def test_sections_dashes_underscores_and_fields_are_all_names(write: Write) -> None:
    options = read(
        write(
            """
            model: {num-layers: 2, hidden_size: 64}
            optimizer:
              lr: 1e-3
            ddp:
              use_megatron_fsdp: true
              data-parallel-sharding-strategy: 2
              average_in_collective: true
              ddp-bucket-size: 5000
            grad_reduce_in_fp32: true
            megatron_fsdp_main_params_dtype: bf16
            ddp_param_name_patterns_for_fp32_local_accumulation: []
            """
        )
    )
    assert (options.model.num_layers, options.model.hidden_size, options.optimizer.lr) == (2, 64, 0.001)
    ddp = options.ddp
    assert (ddp.use_megatron_fsdp, ddp.data_parallel_sharding_strategy) == (True, "optim_grads")
    assert (ddp.average_in_collective, ddp.bucket_size, ddp.grad_reduce_in_fp32) == (True, 5000, True)
    assert ddp.megatron_fsdp_main_params_dtype is torch.bfloat16
    assert {"ddp_average_in_collective", "accumulate_allreduce_grads_in_fp32"} <= options.origins.keys()


def test_a_file_may_use_the_spellings_of_megatron(write: Write) -> None:
    options = read(
        write(
            """
            disable-bias-linear: true
            no_strict_fsdp_dtensor_load: true
            no-check-for-nan-in-loss-and-grad: true
            torch_fsdp2_no_reshard_after_forward: true
            no_swiglu: false
            layernorm_epsilon: 1.0e-6
            hidden_dropout: 0.0
            use_sharp: true
            log_throughput: false
            """
        )
    )
    assert not options.model.add_bias_linear
    assert not options.checkpoint.strict_fsdp_dtensor_load
    assert not options.ddp.check_for_nan_in_grad
    assert options.parallel.torch_fsdp2_no_reshard_after_forward
    assert options.model.norm_epsilon == 1e-6
    assert not options.is_given("swiglu")
    assert options.explained == ("without effect here: --hidden-dropout 0.0, --use-sharp",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rte: 1\n", "run.yaml:1: 'learning_rte' is no option"),
        ("wandb_exp_name: 1.10\n", "invalid --wandb-exp-name 1.1: give a text, in a file with quotes around it"),
        ("lr: high\n", "invalid --lr high: give a finite number"),
        ("train_iters: yes\n", "invalid --train-iters True: give a whole number"),
        ("optimizer: lion\n", "invalid --optimizer lion: give one of adam, sgd, muon, adamw8bit"),
        ("use_megatron_fsdp: 1\n", "invalid --use-megatron-fsdp 1: give true or false"),
        ("seed: 1\ntraining:\n  seed: 2\n", "run.yaml:3: 'seed' is given twice: give it once"),
        (
            "average_in_collective: true\nddp_average_in_collective: true\n",
            "run.yaml:2: 'ddp_average_in_collective' is given twice: give it once",
        ),
        ("optimiser:\n  lr: 1\n", "'optimiser' is no option; give names, or sections of names: model, parallel"),
        ("disable_bias_linear: 3\n", "run.yaml:1: invalid --disable-bias-linear 3: give true or false"),
        ("hidden_dropout: 0.1\n", "run.yaml:1: invalid --hidden-dropout 0.1: nothing is dropped"),
        ("vocab_file: a.json\n", "is not supported: give --tokenizer-type HuggingFaceTokenizer"),
        ("preset: tiny\nlr: 0.1\nlr: 0.2\n", "run.yaml: not YAML: 'lr' is there twice on line 3"),
        ("preset: huge\n", "argument --preset: invalid choice: 'huge'"),
        ("training: &t\n  model: *t\n", "run.yaml: not YAML: Circular reference"),
        ("lr: !!python/object/apply:os.mkdir ['marker']\n", "run.yaml: not YAML: could not determine a constructor"),
        ("train_iters: 1:30\n", "invalid --train-iters 1:30: give a whole number"),
        ("out: ''\n", "invalid --out '': give a path"),
        ("out: ~nobody-of-this-name/x\n", "invalid --out ~nobody-of-this-name/x: give a path"),
        ('load: "a\\0b"\n', ": give a path"),
    ],
)
def test_what_a_file_must_not_say(text: str, words: str, write: Write) -> None:
    assert words in refusal(read, write(text))
    assert not Path("marker").exists()


def test_a_file_in_the_folder_of_a_user_is_found_and_one_that_is_not_there_told(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("seed: 7\n")
    monkeypatch.setenv("HOME", str(path.parent))
    assert parse_options(["--config=~/run.yaml"]).training.seed == 7
    assert refusal(read, path.with_name("none.yaml")).endswith("give the path of a YAML file.")


def test_flags_do_not_silently_undo_what_a_file_contradicts(write: Write) -> None:
    path = write("use_megatron_fsdp: true\npreset: tiny\n")
    assert refusal(resolve, read(path, "--use-torch-fsdp2"), World(2, "cpu")) == (
        "--use-torch-fsdp2 (from the command line) contradicts --use-megatron-fsdp (from the config "
        f"{path}), since one engine shards the model: give one of them"
    )


def test_the_strategy_without_a_flag_is_that_of_megatrons_command_line() -> None:
    sharded = "optim_grads_params"
    for words, strategy in ((["--use-megatron-fsdp"], sharded), (["--use-custom-fsdp"], sharded), ([], "no_shard")):
        assert parse_options(words).ddp.data_parallel_sharding_strategy == strategy


def test_all_that_is_wrong_is_told_at_once_with_file_and_line(write: Write) -> None:
    path = write(
        """
        preset: huge
        lr: high
        training:
          train-iters: 0
          seeed: 1
        ddp: {bucket_size: -3, fsdp_double_buffer: 2}
        """
    )
    told = refusal(read, path, "--micro-batch-size 0 --sede 3").split("\nerror: ")
    assert [one.replace(f"{path}:", "").partition(" (choose from")[0] for one in told] == [
        "there is no flag --sede; did you mean --seed?",
        "2: argument --preset: invalid choice: 'huge'",
        "3: invalid --lr high: give a finite number",
        "5: invalid --train-iters 0: give 1 or more",
        "6: 'seeed' is no option; did you mean seed?",
        "7: argument --ddp-bucket-size: '-3' is not a positive whole number; give 1 or more; see mfsdp train --help",
        "7: invalid --fsdp-double-buffer 2: give true or false",
        "invalid --micro-batch-size 0: give 1 or more",
    ]
