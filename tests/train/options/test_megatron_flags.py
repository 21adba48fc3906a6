"""Every flag of Megatron-LM that matters here is taken, explained or refused; a usual command line works as it is."""

import re

import pytest

from megatron_fsdp.cli.main import main
from megatron_fsdp.config.ddp_config_flags import flag_of
from megatron_fsdp.config.engine_options import with_weight_format
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.train.options import OPTIONS, SECTIONS
from megatron_fsdp.train.options.command_line import (
    ALIASES,
    ELSEWHERE,
    FIXED,
    IDLE,
    OF_CONFIGURATIONS,
    REFUSED,
    VALUED,
    make_parser,
    parse_options,
)
from tests.support.on_ranks import refusal
from tests.support.source_tree import ROOT
from tests.support.train_program import job_of_words

GUIDE = """
--use-megatron-fsdp --data-parallel-sharding-strategy --no-gradient-accumulation-fusion --use-distributed-optimizer
--ckpt-format --calculate-per-token-loss --init-model-with-meta-device --grad-reduce-in-bf16 --fsdp-double-buffer
--use-nccl-ub --dump-param-to-param-group-map --outer-dp-sharding-strategy --num-distributed-optimizer-instances
--megatron-fsdp-main-params-dtype --megatron-fsdp-main-grads-dtype --megatron-fsdp-grad-comm-dtype
--fsdp-manual-registration --suggested-communication-unit-size
"""
"""Of the user guide: all of them are taken."""

PASTED = """
--use-mcore-models --num-layers 2 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --position-embedding-type
rope --rotary-base 500000 --rotary-percent 1.0 --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --attention-softmax-in-fp32
--no-masked-softmax-fusion --attention-backend flash --init-method-std 0.02 --micro-batch-size 1 --global-batch-size
16 --train-iters 10 --bf16 --optimizer adam --lr 3.0e-4 --min-lr 3.0e-5 --lr-decay-style cosine --lr-warmup-iters 2
--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --use-megatron-fsdp
--data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion --use-distributed-optimizer
--ckpt-format fsdp_dtensor --calculate-per-token-loss --init-model-with-meta-device --grad-reduce-in-bf16
--fsdp-double-buffer --use-nccl-ub --overlap-grad-reduce --overlap-param-gather --split 99,1,0
--no-create-attention-mask-in-dataloader --num-workers 2 --save checkpoints --load checkpoints --save-interval 500
--log-interval 1 --eval-interval 5 --eval-iters 1 --log-throughput --manual-gc --manual-gc-interval 50
--distributed-timeout-minutes 60 --dist-ckpt-strictness raise_all
"""
"""A whole command line, as such scripts have it."""

DEEPSEEK_RUN = """
--distributed-timeout-minutes 60 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
--expert-model-parallel-size 8 --context-parallel-size 1 --expert-tensor-parallel-size 1 --use-distributed-optimizer
--use-mcore-models --use-flash-attn --micro-batch-size 1 --global-batch-size 2048 --train-samples 585937500
--exit-duration-in-mins 220 --no-save-optim --no-check-for-nan-in-loss-and-grad --cross-entropy-loss-fusion
--cross-entropy-fusion-impl te --manual-gc --manual-gc-interval 10 --enable-experimental --transformer-impl
transformer_engine --seq-length 4096 --data-cache-path cache --tokenizer-type HuggingFaceTokenizer --tokenizer-model
deepseek-ai/DeepSeek-V3 --data-path data --split 99,1,0 --no-mmap-bin-files --no-create-attention-mask-in-dataloader
--num-workers 6 --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --lr-decay-samples
584765624 --lr-warmup-samples 1536000 --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine
--adam-beta1 0.9 --adam-beta2 0.95 --moe-token-dispatcher-type flex --moe-enable-deepep --moe-grouped-gemm
--moe-permute-fusion --moe-router-fusion --eval-iters 32 --eval-interval 200 --finetune --auto-detect-ckpt-format
--load L --save S --save-interval 500 --dist-ckpt-strictness log_all --log-timers-to-tensorboard
--log-memory-to-tensorboard --log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard
--log-throughput --log-interval 1 --logging-level 40 --tensorboard-dir T --wandb-project P --wandb-exp-name E --bf16
--fp8-recipe mxfp8 --fp8-format e4m3 --fp8-param-gather --recompute-granularity selective --recompute-modules moe_act
layernorm mla_up_proj --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
--no-gradient-accumulation-fusion --ckpt-format fsdp_dtensor --calculate-per-token-loss --init-model-with-meta-device
--grad-reduce-in-bf16 --fsdp-double-buffer --use-nccl-ub --overlap-grad-reduce --overlap-param-gather
--attention-backend fused
"""
"""A command line for DeepSeek-V3 as the guide's scripts have it, without what describes the model; then that."""
DEEPSEEK_MODEL = """
--disable-bias-linear --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
--kv-channels 128 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000
--make-vocab-size-divisible-by 3232 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
--untie-embeddings-and-output-weights --multi-latent-attention --qk-layernorm --num-experts 256 --moe-layer-freq
([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8
--moe-router-pre-softmax --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-router-topk-scaling-factor 2.5
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32 --q-lora-rank 1536
--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0
--mscale-all-dim 1.0 --init-method-std 0.02
"""
DEEPSEEK_LOSSES = """
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-bias-update-rate 1e-3
--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
"""

TAKEN = set(make_parser()._option_string_actions)


def problems(words: list[str]) -> list[str]:
    """What is wrong with a command line, one text each."""
    return refusal(parse_options, words, error=ConfigurationError).split("\nerror: ")


def test_the_flags_of_the_user_guide_are_taken() -> None:
    assert [flag for flag in GUIDE.split() if flag not in TAKEN] == []


def test_a_flag_is_in_one_table_only() -> None:
    tables = [set(IDLE), set(FIXED), set(REFUSED), {option.flag for option in OPTIONS.values()}, set(ALIASES)]
    seen: set[str] = set()
    for table in tables:
        assert seen & table == set()
        seen |= table
    assert {alias.name for alias in ALIASES.values()} <= set(OPTIONS)
    assert set(ELSEWHERE.values()) <= TAKEN
    assert not set(ELSEWHERE) & (TAKEN | set(REFUSED))


def test_a_usual_command_line_is_taken_as_it_is() -> None:
    job = job_of_words(PASTED, 16, "cuda")
    assert job.engine == "megatron_fsdp"
    assert job.batch.microbatches == 1
    idle, *others = job.notes
    assert idle.startswith("without effect here: ")
    told = (
        "--use-mcore-models, --group-query-attention, --rotary-percent 1.0, --attention-dropout 0.0, "
        "--hidden-dropout 0.0, --attention-softmax-in-fp32, --no-masked-softmax-fusion, --attention-backend, "
        "--no-gradient-accumulation-fusion, --no-create-attention-mask-in-dataloader, --log-throughput, --manual-gc, "
        "--manual-gc-interval"
    )
    assert set(idle.partition(": ")[2].split(", ")) == set(told.split(", "))
    assert [note.split()[0] for note in others] == ["--max-position-embeddings", "--save-interval"]


def flags_of(words: str) -> list[str]:
    return [word for word in words.split() if word.startswith("--")]


def test_deepseeks_command_line_is_told_at_once_how_its_model_is_given() -> None:
    """All but five of the other flags work or change nothing; each of those is told what to give."""
    words = DEEPSEEK_RUN + DEEPSEEK_MODEL + DEEPSEEK_LOSSES
    assert [flag for flag in flags_of(words) if flag not in TAKEN and flag not in REFUSED] == []
    of_model, *others = problems(words.split())
    told, _, also = of_model.partition(f": {OF_CONFIGURATIONS}; leave out ")
    assert "give --hf-config FILE" in OF_CONFIGURATIONS
    assert sorted(flags_of(DEEPSEEK_MODEL)) == sorted(re.findall(r"--[\w-]+", told + also))
    assert sorted(flags_of(DEEPSEEK_LOSSES)) == sorted(
        flag for line in others for flag in re.findall(r"--[\w-]+", line.partition(":")[0])
    )
    config = ROOT / "examples/presets/models/deepseek-v3.json"
    job = job_of_words(f"{DEEPSEEK_RUN} --hf-config {config}", 16, "cuda")
    assert (job.engine, job.sizes.expert) == ("megatron_fsdp", 8)
    assert with_weight_format(MixedPrecisionPolicy(), job.ddp).weight_format == "mxfp8"
    idle, modules = job.notes
    assert idle.endswith("--transformer-impl transformer_engine")
    assert modules.startswith("--recompute-modules mla_up_proj moe_act has no effect: ")


def test_flags_with_one_value_take_it_and_no_other() -> None:
    for value_of in (min, max):
        given = [(flag, value_of(fixed.values)) for flag, fixed in FIXED.items()]
        notes = parse_options([word for pair in given for word in pair]).explained
        assert notes == (f"without effect here: {', '.join(map(' '.join, given))}",)
    told = problems([word for flag in FIXED for word in (flag, "0.7")])
    for line, (flag, fixed) in zip(told, FIXED.items(), strict=True):
        assert line.startswith(f"invalid {flag} 0.7: {fixed.reason}; give ")


def test_flags_without_an_effect_are_named_in_one_line() -> None:
    options = parse_options([word for flag in IDLE for word in ([flag, "x"] if flag in VALUED else [flag])])
    assert options.explained == (f"without effect here: {', '.join(IDLE)}",)
    assert options.origins == {}


@pytest.mark.parametrize("form", ["{}", "{} 1", "{}=1"])
def test_refused_flags_say_why_alone_or_with_a_value(form: str) -> None:
    told = problems([word for flag in REFUSED for word in form.format(flag).split()])
    flags = {reason: [flag for flag in REFUSED if REFUSED[flag] == reason] for reason in REFUSED.values()}
    assert told == [
        f"{', '.join(named)} {'are' if named[1:] else 'is'} not supported: {reason}" for reason, named in flags.items()
    ]
    for flag in flags[OF_CONFIGURATIONS][:3]:
        (one,) = problems(f"{form.format(flag)} --num-layers 2 --disable-bias-linear --seq-length 8".split())
        assert one == (
            f"{flag} is not supported: such models come as a configuration: give --hf-config FILE, the config.json of "
            "the model; leave out --num-layers, --disable-bias-linear too"
        )


def test_other_spellings_set_their_option() -> None:
    options = parse_options(
        [word for flag, to in ALIASES.items() for word in ([flag, "2"] if to.value is None else [flag])]
    )
    for alias in ALIASES.values():
        assert options.value(alias.name) == (2 if alias.value is None else alias.value)
    assert options.origins == dict.fromkeys((alias.name for alias in ALIASES.values()), "command line")


# ---- the help of the trainer: complete and grouped -------------------------------------------------------------------


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    return make_parser().format_help()


def test_every_flag_stands_in_it_once_in_the_group_of_its_section(text: str) -> None:
    shown = re.findall(r"^  (--\S+)", text, flags=re.MULTILINE)
    flags = [flag.rstrip(",") for flag in shown]
    fields = [flag_of(name) for name in DistributedDataParallelConfig.__dataclass_fields__]
    options = [option.flag for option in OPTIONS.values()]
    expected = ["--config", "--preset", *options, *fields, *ALIASES, *FIXED]
    assert sorted(flags) == sorted(expected)
    assert re.findall(r"^(\S.*):$", text, flags=re.MULTILINE) == [
        "options",
        "where to begin",
        *SECTIONS,
        "data parallelism",
        "other spellings",
        "of Megatron-LM, with one possible value",
    ]


def test_help_ends_well_and_a_wrong_flag_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    assert "--use-megatron-fsdp, --no-use-megatron-fsdp" in capsys.readouterr().out
    assert main(["train", "--use-megatron-fsd"]) == 2
    assert capsys.readouterr().err == (
        "error: there is no flag --use-megatron-fsd; did you mean --use-megatron-fsdp?\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--lr", "argument --lr: expected one argument"),
        ("stray", "'stray' belongs to no flag: leave it out"),
        ("--data-parallel-sharding-strategy zero9", "invalid choice: 'zero9'"),
        ("--preset huge", "invalid choice: 'huge'"),
        ("--zero-stage 3", "there is no flag --zero-stage"),
        ("--learning-rate 1e-3", "there is no flag --learning-rate; did you mean --lr?"),
        ("--output_dir=x", "there is no flag --output_dir=x; did you mean --save?"),
        ("--micro-batch 2", "there is no flag --micro-batch; did you mean --micro-batch-size?"),
        ("--swiglu=true", "argument --swiglu/--no-swiglu: takes no value, and 'true' was given"),
        ("--data-path 0.3 a 0.7 b", "'a' belongs to no flag: leave it out, since --data-path takes one place"),
    ],
)
def test_unreadable_words_are_refused_in_one_line(words: str, told: str) -> None:
    (found,) = problems(words.split())
    assert told in found
    assert "\n" not in found
