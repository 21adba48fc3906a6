"""The count of operations beside counts by hand: groups of heads, biases, tied weights, recomputation, experts."""

import pytest
import torch

from megatron_fsdp.train.models.build import model_flops
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World, resolve

LAYERS, WIDTH, HEADS, INNER, IDS, LENGTH = 2, 32, 4, 48, 64, 16
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {WIDTH} --num-attention-heads {HEADS} --ffn-hidden-size {INNER} "
    f"--seq-length {LENGTH} --make-vocab-size-divisible-by {IDS} --micro-batch-size 1 --train-iters 1 --lr 1e-3"
)
ROTARY = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
OTHERS = f"{ROTARY} --transformer-impl transformers"


def count(flags: str, vocab_size: int = IDS) -> float:
    job = resolve(parse_options([*FLAGS.split(), *flags.split()]), World(1, "cpu"))
    return model_flops(job, vocab_size)


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
