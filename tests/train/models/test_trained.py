"""What a job trains: first weights, groups of its optimizer, operations of a step, float16."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp.train.loop import train
from megatron_fsdp.train.models.build import model_flops
from megatron_fsdp.train.models.trained import GROWTH_INTERVAL, LossScale, build_optimizer
from megatron_fsdp.train.options import OptimizerOptions
from tests.conftest import RunRanks
from tests.support.on_ranks import assert_equal_tensors, on_ranks
from tests.support.train_program import job_of_words
from tests.train.models.runs import (
    DECODER,
    LLAMA,
    NoCheckpoints,
    Silent,
    expected,
    initial_weights,
    prepare,
    whole_weights,
)

OTHER = {
    **DECODER,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "qk_layernorm": True,
    "kv_channels": 6,
}
UNTIED = {**DECODER, "untie_embeddings_and_output_weights": True}


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("model", [OTHER, UNTIED])
@pytest.mark.parametrize(
    "engine",
    [
        {"use_megatron_fsdp": True},
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim", "bf16": True},
        {"use_torch_fsdp2": True, "bf16": True},
    ],
)
def test_initial_weights_are_the_same_bit_for_bit(
    run_ranks: RunRanks, model: dict[str, Any], engine: dict[str, Any]
) -> None:
    plain, meta = (
        run_ranks(2, initial_weights, {**model, **engine, "init_model_with_meta_device": is_meta})
        for is_meta in (False, True)
    )
    for built, drawn in zip(plain, meta, strict=True):
        assert built.keys() == drawn.keys()
        assert all(torch.equal(built[name], value) for name, value in drawn.items())
    drawn = meta[0]["blocks.1.feed_forward.output.weight"]
    assert drawn.std().item() == pytest.approx(0.1 / 2, rel=0.1)  # the root of 2 * 2 layers


def test_options_of_the_optimizer_are_those_of_its_groups() -> None:
    model = nn.Linear(2, 2)
    for options, values in (
        (
            OptimizerOptions(lr=0.5, weight_decay=0.25, adam_beta1=0.1, adam_beta2=0.2, adam_eps=0.3),
            {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3},
        ),
        (OptimizerOptions("sgd", lr=0.5, weight_decay=0.25, sgd_momentum=0.4), {"lr": 0.5, "momentum": 0.4}),
    ):
        groups = build_optimizer(model, options).param_groups
        assert [group["params"] for group in groups] == [[model.weight], [model.bias]]
        assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
        assert all(group[name] == value for group in groups for name, value in values.items())


# ---- the count of operations beside counts by hand -------------------------------------------------------------------


LAYERS, WIDTH, HEADS, INNER, IDS, LENGTH = 2, 32, 4, 48, 64, 16
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {WIDTH} --num-attention-heads {HEADS} --ffn-hidden-size {INNER} "
    f"--seq-length {LENGTH} --make-vocab-size-divisible-by {IDS} --micro-batch-size 1 --train-iters 1 --lr 1e-3"
)
ROTARY = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
OTHERS = f"{ROTARY} --transformer-impl transformers"


def count(flags: str, vocab_size: int = IDS) -> float:
    return model_flops(job_of_words(f"{FLAGS} {flags}", 1), vocab_size)


def by_hand(attention: int, feed_forward: int, mixed: int = WIDTH) -> int:
    """Of a sample: forward is a multiply-add for each weight and token, and backward two; attention multiplies twice.

    Args:
        attention: Weights of the projections of a layer.
        feed_forward: Weights of its feed-forward layer that a token meets.
        mixed: Width of all heads of queries together.
    """
    weights = LAYERS * (attention + feed_forward) + WIDTH * IDS
    products = LAYERS * 2 * LENGTH * LENGTH * mixed
    return 3 * 2 * (LENGTH * weights + products)


FULL_HEADS, GROUPED = 4 * WIDTH * WIDTH, 2 * WIDTH * WIDTH + 2 * WIDTH * 16  # two groups of width 8
GELU, GATED = 2 * WIDTH * INNER, 3 * WIDTH * INNER


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", by_hand(FULL_HEADS, GELU)),  # adding biases and looking up vectors cost nothing
        ("--untie-embeddings-and-output-weights", by_hand(FULL_HEADS, GELU)),
        (f"{ROTARY} --num-query-groups 2", by_hand(GROUPED, GATED)),
        (f"{OTHERS} --num-query-groups 2", by_hand(GROUPED, GATED)),
        ("--kv-channels 6", by_hand(4 * WIDTH * 24, GELU, mixed=24)),
        ("--recompute-granularity full", by_hand(FULL_HEADS, GELU)),
        (f"{OTHERS} --recompute-granularity full", by_hand(FULL_HEADS, GATED)),
        (f"{OTHERS} --num-experts 8 --moe-router-topk 3", by_hand(FULL_HEADS, 3 * GATED + WIDTH * 8)),
        (
            f"{OTHERS} --qk-layernorm --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16",
            by_hand(FULL_HEADS, 2 * 3 * WIDTH * 16 + WIDTH * 8),
        ),
    ],
)
def test_count_is_that_by_hand(flags: str, expected: int) -> None:
    if "transformers" in flags:
        pytest.importorskip("transformers")
    assert count(flags) == expected


def test_the_vocabulary_counts_as_it_is_rounded_up_and_no_numbers_are_drawn() -> None:
    state = torch.get_rng_state()
    assert count("", vocab_size=IDS - 7) == by_hand(FULL_HEADS, GELU)
    assert torch.equal(torch.get_rng_state(), state)


# ---- training in float16 with a scaled loss: the same updates, overflow that is no failure, and real failures --------


HALF = {"fp16": True, "initial_loss_scale": 2.0**10}
UNITS = {"use_megatron_fsdp": True}
FSDP2 = {"use_torch_fsdp2": True}


@pytest.mark.full(short=["values0", "values1"])
@pytest.mark.parametrize(
    "values",
    [
        {**DECODER, **UNITS},
        {**LLAMA, **FSDP2, "pipeline_model_parallel_size": 2},
        {**DECODER, "overlap_grad_reduce": True},
    ],
)
@on_ranks(2)
def test_losses_are_those_of_float32_but_for_rounding(values: dict[str, Any]) -> None:
    plain, run, watcher = expected(values), prepare({**values, **HALF}), Silent()
    progress, *_ = train(run, watcher, NoCheckpoints())
    losses = [record.loss for record in watcher.records]
    assert losses == pytest.approx(plain.losses, rel=2e-3)
    assert losses != plain.losses
    assert run.trained.scale is not None
    assert (run.trained.scale.value, watcher.said, progress.skipped) == (2.0**10, [], 0)


@on_ranks(2)
def test_overflow_halves_the_scale_and_is_no_failure() -> None:
    """With a scale of 2**60 every step overflows; none may count towards --max-nan-steps 0, and no weight moves."""
    run, watcher = prepare({**DECODER, **UNITS, **HALF, "initial_loss_scale": 2.0**60, "max_nan_steps": 0}), Silent()
    before = whole_weights(run.trained.model)
    progress, *_ = train(run, watcher, NoCheckpoints())
    assert run.trained.scale is not None
    assert (run.trained.scale.value, progress.skipped, len(watcher.records)) == (2.0**57, 3, 3)
    assert len(watcher.said) == 3
    assert watcher.said[0] == f"step 1: gradients overflow float16 at loss scale {2**60:,}: skipped, halved"
    assert_equal_tensors(whole_weights(run.trained.model), before)


def test_scale_doubles_after_many_good_steps_is_restored_and_does_not_fall_below_one() -> None:
    scale, other = LossScale(8.0), LossScale(1.5)
    assert other.has_overflowed(2.0, float("inf"))
    assert not other.has_overflowed(2.0, 3.0)
    assert not other.has_overflowed(float("nan"), float("nan"))
    other.shrink()
    assert other.value == 1.0
    assert not other.has_overflowed(2.0, float("inf"))
    for _ in range(GROWTH_INTERVAL - 1):
        scale.grow()
    other.load_state_dict(scale.state_dict())
    assert (other.value, other.good_steps) == (8.0, GROWTH_INTERVAL - 1)
    other.grow()
    assert (other.value, other.good_steps) == (16.0, 0)
    scale.shrink()
    assert (scale.value, scale.good_steps) == (4.0, 0)
