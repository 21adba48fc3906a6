"""The options about batches, steps, the optimizer and when to end; Megatron-LM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainingOptions:
    """Batches, precision, and when to evaluate and to end.

    Attributes:
        micro_batch_size: Samples per rank and microbatch.
        global_batch_size: Samples of an optimizer step, over all ranks; default: one microbatch of each data-parallel
            rank. Any number of ranks trains on the same samples: what does not come out even is filled up with samples
            that do not count.
        train_iters: Optimizer steps, those of the runs that this one goes on from included.
        exit_interval: End after a step that is a multiple of this.
        exit_duration_in_mins: End after a step at which this many minutes of training have passed in all.
        seed: Fixes the initial weights, the order of the data and the text that is written.
        bf16: Compute in bfloat16.
        fp16: Compute in float16, with a scaled loss.
        initial_loss_scale: Where the scale of the loss begins.
        auto_bf16: Compute in bfloat16 where the hardware multiplies it, else in float32.
        grad_reduce_in_bf16: Reduce gradients in bfloat16 in place of float32; they accumulate in float32 anyway.
        calculate_per_token_loss: Every token counts alike, in place of every sample; gradients are summed over ranks.
        recompute_granularity: Recompute whole blocks, or the core of attention, in backward.
        recompute_method: With granularity full: block recomputes the first blocks, uniform all of them, one by one.
        recompute_num_layers: How many of the first blocks to recompute, with granularity full; default: all. With
            method uniform it is 1, the blocks that are recomputed together.
        eval_interval: Steps between evaluations; default: none before the end.
        eval_iters: Global batches of held-out text for each evaluation.
        skip_train: Only evaluate, and write a sample.
    """

    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    train_iters: int | None = None
    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None
    seed: int = 1234
    bf16: bool = False
    fp16: bool = False
    initial_loss_scale: float = 2.0**32
    auto_bf16: bool = False
    grad_reduce_in_bf16: bool = False
    calculate_per_token_loss: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    eval_interval: int | None = None
    eval_iters: int = 2
    skip_train: bool = False


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer, clipping and the learning rate over the steps.

    Attributes:
        optimizer: AdamW, or SGD with momentum.
        lr: Largest learning rate.
        min_lr: Smallest learning rate, at the end of the decay.
        lr_decay_style: How it falls after the warmup.
        lr_decay_iters: Step at which it has fallen all the way; default: the last one.
        lr_warmup_iters: Steps in which it rises.
        lr_warmup_fraction: The same, as a share of the steps of the decay.
        lr_wsd_decay_iters: Steps of the fall at the end, with style WSD.
        weight_decay: Of matrices; biases, norms and embeddings have none.
        adam_beta1: Average of gradients.
        adam_beta2: Average of their squares.
        adam_eps: Added to the root of the second average.
        sgd_momentum: Momentum of SGD.
        clip_grad: Largest norm of all gradients; 0: they are not scaled.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float | None = None
    min_lr: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_decay_iters: int | None = None
    lr_warmup_iters: int = 0
    lr_warmup_fraction: float | None = None
    lr_wsd_decay_iters: int | None = None
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    clip_grad: float = 1.0
