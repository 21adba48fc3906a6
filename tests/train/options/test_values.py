"""Values and combinations of options: what is possible, and the words about what is not."""

import re
from functools import partial

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options import OPTIONS
from megatron_fsdp.train.options.checks import parse_split, require_there
from megatron_fsdp.train.options.command_line import PRESETS, parse_options
from megatron_fsdp.train.options.job import Job, World, check_environment
from tests.support import on_ranks
from tests.support.train_program import job_of_words

refusal = partial(on_ranks.refusal, error=ConfigurationError)

RUN = "--preset tiny"
IDS = "--tokenizer-type NullTokenizer --data-path ids"
OWN = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --micro-batch-size 1 --train-iters 9"


def job_of(words: str, ranks: int = 4) -> Job:
    return job_of_words(words, ranks, "cuda")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_preset_trains_on_any_ranks_without_a_notice(preset: str, ranks: int) -> None:
    assert job_of(f"--preset {preset}", ranks).notes == ()


REFUSED = {
    "--micro-batch-size 0": "invalid --micro-batch-size 0: give 1 or more",
    "--adam-beta1 1": "invalid --adam-beta1 1: give 0 or more, and less than 1",
    f"--hidden-size {2**63}": f"invalid --hidden-size {2**63}: give less than 2^63",
    "--lr-warmup-iters 30": "--lr-warmup-iters 30 does not end within 30 steps",
    "--min-lr 1": "--min-lr 1.0 is more than --lr 0.003: give less",
    "--train-samples 15": "--train-samples 15 is less than the 16 of one step: give more",
    "--lr-warmup-init 1e-4 --lr-warmup-iters 0": "--lr-warmup-init does nothing without a warmup",
    "--lr-decay-style WSD": "--lr-wsd-decay-iters and --lr-decay-style WSD belong together",
    "--global-batch-size 2": "--global-batch-size 2 is less than --micro-batch-size 4",
    "--tensor-model-parallel-size 3": "4 ranks cannot be cut into tensor 3 x pipeline 1 x context 1 = 3",
    "--num-distributed-optimizer-instances 3": "--num-distributed-optimizer-instances 3 does not divide the 4",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2": (
        "--recompute-method uniform --recompute-num-layers 2 is not possible"
    ),
    "--distributed-timeout-minutes 1e9": "invalid --distributed-timeout-minutes 1e9: give above 0, and at most 525600",
    # what does nothing
    "--moe-router-topk 2": "--moe-router-topk does nothing without --num-experts",
    "--expert-model-parallel-size 2": "the decoder of this package is not cut over",
    "--torch-fsdp2-no-reshard-after-forward": (
        "--torch-fsdp2-no-reshard-after-forward does nothing without --use-torch-fsdp2"
    ),
    "--sequence-parallel": "--sequence-parallel does nothing with --tensor-model-parallel-size 1",
    "--optimizer sgd --adam-eps 1e-6": "--adam-eps does nothing without --optimizer adam or muon or adamw8bit",
    "--use-torch-fsdp2 --optimizer muon": "--optimizer muon does not step the shards of --use-torch-fsdp2",
    "--no-use-megatron-fsdp --init-model-with-meta-device": "--init-model-with-meta-device does nothing where every",
    "--ddp-num-buckets 2": "--ddp-num-buckets 2 has no effect with --use-megatron-fsdp; leave it out",
    "--no-use-megatron-fsdp --data-parallel-sharding-strategy optim_grads": (
        "--data-parallel-sharding-strategy optim_grads has no effect without --use-megatron-fsdp"
    ),
    "--use-torch-fsdp2 --fsdp-double-buffer": "--fsdp-double-buffer does nothing with --use-torch-fsdp2",
    "--no-grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation": (
        "--ddp-reduce-scatter-with-fp32-accumulation does nothing here, since gradients are communicated in float32"
    ),
    "--outer-dp-sharding-strategy optim": "--outer-dp-sharding-strategy optim has no effect with",
    # what contradicts something else, both of which are named
    "--bf16 --fp16": "--bf16",
    "--lr-warmup-iters 2 --lr-warmup-fraction 0.1": "--lr-warmup-iters",
    "--train-samples 640 --train-iters 9": "--train-samples",
    "--hf-config a --hf-model b": "--hf-config",
    "--use-torch-fsdp2 --use-megatron-fsdp": "--use-torch-fsdp2",
    "--grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32": "--grad-reduce-in-bf16",
    "--grad-reduce-in-bf16 --megatron-fsdp-grad-comm-dtype fp32": "--grad-reduce-in-bf16",
    "--calculate-per-token-loss --ddp-average-in-collective": "--calculate-per-token-loss",
    # text
    "--split 1": "invalid --split 1: give",
    "--tokenizer-type HuggingFaceTokenizer": (
        "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: give a tokenizer.json"
    ),
    "--tokenizer-type NullTokenizer --data-path x": "--tokenizer-type NullTokenizer needs --vocab-size: give how many",
    "--tokenizer-type bpe --vocab-size 256": "--vocab-size 256 is less than the 256 bytes and the end of a text",
    f"{IDS} --vocab-size 9 --eod-mask-loss": "--eod-mask-loss does nothing without --tokenizer-type byte or bpe",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_possible_or_does_nothing_is_refused_by_its_flag(words: str) -> None:
    told, (first, *others) = refusal(job_of, f"{RUN} {words}"), (word for word in words.split() if word[:2] == "--")
    assert told.startswith(REFUSED[words])
    if REFUSED[words] == first:
        assert f" contradicts {others[0]}" in told
        assert told.endswith("give one of them")


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--max-position-embeddings 64", "--max-position-embeddings has no effect: rotary positions have no table"),
        ("--save c --save-interval 99", "--save-interval has no effect: training ends before"),
        ("--load c --finetune --no-load-optim", "--no-load-optim has no effect: --finetune loads weights only"),
        ("--skip-train --save c", "--save has no effect: --skip-train takes no step"),
        ("--nproc 2", "--nproc 2 has no effect: 4 ranks were started"),
        (
            "--global-batch-size 20",
            (
                "12 of 32 samples of a step only fill up, and do not count: --global-batch-size 20 is no multiple of "
                "--micro-batch-size 4 x 4 data-parallel ranks"
            ),
        ),
        *(
            (flag, f"{flag} has no effect: --data-parallel-sharding-strategy optim_grads_params implies it")
            for flag in ("--no-use-distributed-optimizer", "--no-overlap-grad-reduce", "--no-overlap-param-gather")
        ),
    ],
)
def test_what_is_usual_and_does_nothing_is_told(words: str, note: str) -> None:
    assert job_of(f"{RUN} {words}").notes == (note,)


def test_an_evaluation_alone_needs_no_steps_and_no_rate() -> None:
    job = job_of(f"{OWN.removesuffix(' --train-iters 9')} --skip-train --load saved")
    assert (job.train_iters, job.schedule.rate(0)) == (0, 0.0)


@pytest.mark.parametrize("flag", ["--hf-model", "--hf-config"])
def test_a_model_that_is_not_there_is_told_with_its_flag_and_how_to_get_it(flag: str) -> None:
    options = parse_options([*OWN.split()[6:], flag, "meta-llama/Llama-3.2-1B"])
    told = f"{flag} meta-llama/Llama-3.2-1B does not exist: .* `hf download meta-llama/Llama-3.2-1B --local-dir DIR`"
    assert re.search(told, refusal(require_there, options))


@pytest.mark.parametrize("missing", ["--seq-length", "--micro-batch-size", "--train-iters", "--lr"])
def test_what_nothing_can_stand_in_for_is_asked_for(missing: str) -> None:
    words = f"{OWN} --lr 0.1".split()
    at = words.index(missing)
    assert refusal(job_of, " ".join(words[:at] + words[at + 2 :])).startswith(f"{missing} is missing")


def test_every_number_has_bounds() -> None:
    numbers = [option for option in OPTIONS.values() if option.kind in (int, float) and not option.choices]
    for option in numbers:
        assert refusal(job_of, f"{RUN} {option.flag} -7").startswith(f"invalid {option.flag} -7: give ")


NO_SPLITS = "|95|95,|95,five|100,0|0,1|1,2,3,4|-1,2|nan,1|inf,1|1,1,-1|1e308,1e308,1e308|1,1e-320,1e308"


def test_other_splits_are_refused() -> None:
    for text in NO_SPLITS.split("|"):
        assert f"invalid --split {text}: give two numbers above 0" in refusal(parse_split, text)


# ---- variables of the environment that the user guide warns of -------------------------------------------------------


@pytest.mark.parametrize(("words", "flag"), [("", "--use-megatron-fsdp"), 2 * ("--use-torch-fsdp2",)])
def test_one_connection_is_refused_with_full_sharding(words: str, flag: str) -> None:
    job = job_of(f"{RUN} {words}")
    told = refusal(check_environment, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, job, World(4, "cuda"))
    assert told == (
        "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all kernels into one queue, where gathers and reductions of "
        f"{flag} wait behind compute: `unset CUDA_DEVICE_MAX_CONNECTIONS`, or give 8 or more"
    )
