"""Flags of Megatron-LM that are not options here: those that change nothing, and those that are refused, with reasons.

A flag about speed or memory that this package does by other means is taken, and said to have no effect; one that would
change numbers, or ask for something that is not there, is refused. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFlag:
    """A flag without an effect.

    Attributes:
        reason: Why, and what to do in place of it; the end of a sentence that begins with the flag.
        takes_value: Whether a value (or several) follows it.
    """

    reason: str
    takes_value: bool = False


EXPLAINED: Mapping[str, KnownFlag] = {
    "--use-sharp": KnownFlag("asks the network to reduce, which NCCL does by its own settings (NCCL_COLLNET_ENABLE)"),
    "--sharp-enabled-group": KnownFlag("says where --use-sharp holds, which has no effect either", takes_value=True),
    "--high-priority-stream-groups": KnownFlag("all communication has lanes of its own here", takes_value=True),
    "--nccl-communicator-config-path": KnownFlag("NCCL takes NCCL_CONF_FILE", takes_value=True),
    "--create-all-gather-group": KnownFlag("gathers and reductions travel in lanes of their own already"),
    "--use-gloo-process-groups": KnownFlag("checkpoints need no group of their own"),
    "--disable-gloo-process-groups": KnownFlag("no group over gloo is made beside NCCL's but for the checkpoints"),
    "--no-align-grad-reduce": KnownFlag("pipeline stages reduce independently here"),
    "--disable-align-grad-reduce": KnownFlag("pipeline stages reduce independently here"),
    "--no-ckpt-fully-parallel-save": KnownFlag("each rank writes the shards that it holds"),
    "--ckpt-fully-parallel-load": KnownFlag("each rank reads the shards that it holds, always"),
    "--ckpt-assume-constant-structure": KnownFlag("no plan is made for a save that could be kept"),
    "--dist-ckpt-workers": KnownFlag("each rank writes one file", takes_value=True),
    "--async-strategy": KnownFlag("--async-save has one way of its own", takes_value=True),
    "--use-persistent-ckpt-worker": KnownFlag("--async-save writes from a thread"),
    "--dist-ckpt-optim-fully-reshardable": KnownFlag("optimizer state is always saved so that any ranks can load it"),
    "--auto-detect-ckpt-format": KnownFlag("the format of what is loaded is always looked at"),
    "--group-query-attention": KnownFlag("--num-query-groups alone decides"),
    "--exit-signal-handler": KnownFlag("SIGTERM always saves, where --save is given"),
    "--use-mcore-models": KnownFlag("there is one kind of model"),
    "--use-flash-attn": KnownFlag("PyTorch chooses the kernel of attention"),
    "--log-throughput": KnownFlag("throughput is always shown"),
    "--overlap-p2p-communication": KnownFlag("the pipeline's schedule decides"),
}
"""Taken, with a notice that says so."""

REFUSED: Mapping[str, str] = {
    "--enable-full-sharding-in-hsdp": "nothing ever read it; give --outer-dp-sharding-strategy optim",
    "--overlap-param-gather-with-optimizer-step": "gathers begin when the optimizer has stepped; give "
    "--overlap-param-gather",
    "--gtp-remat-reduce-scatter-with-fp32-accumulation": "weights are not cut over an axis of their own here",
    "--gtp-remat-nccl-ub": "weights are not cut over an axis of their own here",
    "--gtp-expert-remat-nccl-ub": "weights are not cut over an axis of their own here",
    "--use-precision-aware-optimizer": "states of the optimizer have the dtype of the main weights; give "
    "--megatron-fsdp-main-params-dtype",
    "--main-grads-dtype": "give --megatron-fsdp-main-grads-dtype",
    "--main-params-dtype": "give --megatron-fsdp-main-params-dtype",
    "--exp-avg-dtype": "states of the optimizer have the dtype of the main weights",
    "--exp-avg-sq-dtype": "states of the optimizer have the dtype of the main weights",
    "--optimizer-cpu-offload": "states of the optimizer stay on the device",
    "--fp4-format": "4-bit weights are not implemented",
    "--fp8-format": "float8 weights are not implemented",
    "--data-parallel-random-init": "initial weights are the same for any number of ranks here",
    "--check-weight-hash-across-dp-replicas-interval": "give MFSDP_VERIFY_RANKS=step, which compares ranks each step",
    "--use-tp-pp-dp-mapping": "ranks lie pipeline by data by context by tensor, always",
    "--fake-process-group": "`mfsdp plan --check` runs one rank of many without the others",
    "--dist-ckpt-strictness": "give --no-strict-fsdp-dtensor-load to load what fits",
    "--distrib-optim-fully-reshardable-mem-efficient": "states are never gathered to be saved",
    "--ckpt-fully-parallel-load-exchange-algo": "ranks read what they hold, and exchange nothing",
    "--load-main-params-from-ckpt": "main weights are what a checkpoint holds, so they are always loaded",
    "--ckpt-convert-format": "convert with `mfsdp checkpoint convert`",
    "--ckpt-convert-save": "convert with `mfsdp checkpoint convert`",
    "--ckpt-drop-redundant-extra-state": "no extra state is saved that could be dropped",
    "--dist-ckpt-save-pre-mcore-014": "nothing ever read it",
    "--override-ckpt-iteration": "name the checkpoint's folder: --load FOLDER/iter_0000010",
    "--use-dist-ckpt": "give --ckpt-format fsdp_dtensor",
    "--num-layers-per-virtual-pipeline-stage": "interleaved pipelines are not offered by the trainer",
    "--tokenizer-name-or-path": "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH",
    "--train-samples": "give --train-iters: samples by --global-batch-size",
    "--rampup-batch-size": "the batch has one size in a run",
    "--save-retain-interval": "give --keep-last",
    "--recompute-activations": "give --recompute-granularity selective",
    "--recompute-method": "the first --recompute-num-layers blocks are recomputed, which is Megatron's method block",
    "--transformer-engine": "give --transformer-impl local or transformers",
}
"""Refused, with the reason and what to do."""
