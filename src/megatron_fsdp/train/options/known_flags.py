"""Flags of Megatron-LM that are no options here but may be given: they change nothing, or must have one value.

A flag about speed, display or plumbing that this package does by other means is taken, and said to have no effect
(`EXPLAINED`). A flag that would change numbers is taken if it asks for what happens anyway (`FIXED`). All others are in
`refused_flags`. Pure data.
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


@dataclass(frozen=True)
class FixedFlag:
    """A flag that may only ask for what happens anyway.

    Attributes:
        values: What may follow it; numbers may be written in other ways.
        reason: What happens, and what to do in place of it.
    """

    values: tuple[str, ...]
    reason: str

    def allows(self, text: str) -> bool:
        """Whether a text is one of the values, or the same number."""
        return text in self.values or _number(text) in [number for each in self.values if (number := _number(each))]


def _number(text: str) -> tuple[float] | None:
    try:
        return (float(text),)
    except ValueError:
        return None


_KERNELS = "PyTorch chooses the kernels"
_PIPELINE = "the schedule of the pipeline decides"
_DISPATCH = "transformers and PyTorch decide how tokens travel to experts"
_TENSORBOARD = "everything that is measured is written"
_TIMERS = "the time of a step is always measured; `mfsdp trace` shows where it goes"
_COLLECTOR = "Python's collector runs when it wants to"
_SAVING = "each rank writes the shards that it holds"

EXPLAINED: Mapping[str, KnownFlag] = {
    # Communication
    "--use-sharp": KnownFlag("asks the network to reduce, which NCCL does by its own settings (NCCL_COLLNET_ENABLE)"),
    "--sharp-enabled-group": KnownFlag("says where --use-sharp holds, which has no effect either", takes_value=True),
    "--high-priority-stream-groups": KnownFlag("all communication has lanes of its own here", takes_value=True),
    "--nccl-communicator-config-path": KnownFlag("NCCL takes NCCL_CONF_FILE", takes_value=True),
    "--create-all-gather-group": KnownFlag("gathers and reductions travel in lanes of their own already"),
    "--use-gloo-process-groups": KnownFlag("checkpoints need no group of their own"),
    "--disable-gloo-process-groups": KnownFlag("no group over gloo is made beside NCCL's but for the checkpoints"),
    "--no-use-gloo-process-groups": KnownFlag("no group over gloo is made beside NCCL's but for the checkpoints"),
    "--no-align-grad-reduce": KnownFlag("pipeline stages reduce independently here"),
    "--disable-align-grad-reduce": KnownFlag("pipeline stages reduce independently here"),
    "--overlap-p2p-communication": KnownFlag(_PIPELINE),
    "--no-overlap-p2p-communication": KnownFlag(_PIPELINE),
    "--defer-embedding-wgrad-compute": KnownFlag(_PIPELINE),
    "--tp-comm-overlap": KnownFlag("PyTorch's tensor parallelism decides what overlaps"),
    "--cp-comm-type": KnownFlag("PyTorch's context parallelism decides what travels", takes_value=True),
    "--overlap-moe-expert-parallel-comm": KnownFlag(_DISPATCH),
    # Checkpoints
    "--no-ckpt-fully-parallel-save": KnownFlag(_SAVING),
    "--ckpt-fully-parallel-save": KnownFlag(_SAVING),
    "--ckpt-fully-parallel-load": KnownFlag("each rank reads the shards that it holds, always"),
    "--ckpt-fully-parallel-load-exchange-algo": KnownFlag("ranks read what they hold", takes_value=True),
    "--ckpt-fully-parallel-load-process-group": KnownFlag("ranks read what they hold", takes_value=True),
    "--ckpt-fully-parallel-load-per-rank-objects": KnownFlag("ranks read what they hold"),
    "--ckpt-assume-constant-structure": KnownFlag("no plan is made for a save that could be kept"),
    "--dist-ckpt-workers": KnownFlag("each rank writes one file", takes_value=True),
    "--async-strategy": KnownFlag("--async-save has one way of its own", takes_value=True),
    "--use-persistent-ckpt-worker": KnownFlag("--async-save writes from a thread"),
    "--dist-ckpt-optim-fully-reshardable": KnownFlag("optimizer state is always saved so that any ranks can load it"),
    "--distrib-optim-fully-reshardable-mem-efficient": KnownFlag("states are never gathered to be saved"),
    "--auto-detect-ckpt-format": KnownFlag("the format of what is loaded is always looked at"),
    "--exit-on-missing-checkpoint": KnownFlag("a missing checkpoint ends the run, but where --load and --save agree"),
    "--log-progress": KnownFlag("the folder of results and that of checkpoints tell how far a run came"),
    # Kernels
    "--use-flash-attn": KnownFlag(_KERNELS),
    "--attention-backend": KnownFlag(_KERNELS, takes_value=True),
    "--attention-softmax-in-fp32": KnownFlag("the kernels of attention add up in float32"),
    "--no-masked-softmax-fusion": KnownFlag(_KERNELS),
    "--no-bias-gelu-fusion": KnownFlag(_KERNELS),
    "--no-bias-swiglu-fusion": KnownFlag(_KERNELS),
    "--no-bias-dropout-fusion": KnownFlag(_KERNELS),
    "--no-rope-fusion": KnownFlag(_KERNELS),
    "--no-persist-layer-norm": KnownFlag(_KERNELS),
    "--apply-rope-fusion": KnownFlag(_KERNELS),
    "--cross-entropy-loss-fusion": KnownFlag(_KERNELS),
    "--cross-entropy-fusion-impl": KnownFlag(_KERNELS, takes_value=True),
    "--moe-grouped-gemm": KnownFlag(_KERNELS),
    "--moe-permute-fusion": KnownFlag(_DISPATCH),
    "--moe-router-fusion": KnownFlag(_KERNELS),
    "--moe-token-dispatcher-type": KnownFlag(_DISPATCH, takes_value=True),
    "--moe-flex-dispatcher-backend": KnownFlag(_DISPATCH, takes_value=True),
    "--moe-enable-deepep": KnownFlag(_DISPATCH),
    "--te-rng-tracker": KnownFlag("no CUDA graph is captured"),
    # Display
    "--log-throughput": KnownFlag("throughput is always shown"),
    "--log-memory-to-tensorboard": KnownFlag(_TENSORBOARD),
    "--log-validation-ppl-to-tensorboard": KnownFlag(_TENSORBOARD),
    "--log-timers-to-tensorboard": KnownFlag(_TENSORBOARD),
    "--log-batch-size-to-tensorboard": KnownFlag("the batch has one size in a run"),
    "--log-world-size-to-tensorboard": KnownFlag("the summary of a run tells it"),
    "--no-log-learnig-rate-to-tensorboard": KnownFlag(_TENSORBOARD),
    "--no-log-learning-rate-to-tensorboard": KnownFlag(_TENSORBOARD),
    "--no-log-loss-scale-to-tensorboard": KnownFlag(_TENSORBOARD),
    "--tensorboard-log-interval": KnownFlag("every step is written, at each --log-interval", takes_value=True),
    "--tensorboard-queue-size": KnownFlag("what is measured is written at each --log-interval", takes_value=True),
    "--timing-log-level": KnownFlag(_TIMERS, takes_value=True),
    "--timing-log-option": KnownFlag(_TIMERS, takes_value=True),
    "--no-barrier-with-level-1-timing": KnownFlag(_TIMERS),
    "--enable-one-logger": KnownFlag("there is no such logger"),
    "--no-one-logger": KnownFlag("there is no such logger"),
    "--wandb-save-dir": KnownFlag("W&B's files lie in the folder of results", takes_value=True),
    # The rest
    "--group-query-attention": KnownFlag("--num-query-groups alone decides"),
    "--exit-signal-handler": KnownFlag("SIGTERM always saves, where --save is given"),
    "--use-mcore-models": KnownFlag("there is one kind of model"),
    "--use-cpu-initialization": KnownFlag("initial weights are the same for any number of ranks anyway"),
    "--enable-experimental": KnownFlag("nothing waits behind such a switch"),
    "--no-mmap-bin-files": KnownFlag("token files are always mapped"),
    "--no-create-attention-mask-in-dataloader": KnownFlag("attention is causal without a mask"),
    "--num-dataset-builder-threads": KnownFlag("the order of samples is computed, not built", takes_value=True),
    "--manual-gc": KnownFlag(_COLLECTOR),
    "--manual-gc-interval": KnownFlag(_COLLECTOR, takes_value=True),
    "--no-manual-gc-eval": KnownFlag(_COLLECTOR),
    "--empty-unused-memory-level": KnownFlag("PyTorch's allocator keeps what it has", takes_value=True),
    "--override-opt_param-scheduler": KnownFlag("the learning rate is always what the flags say"),
    "--override-opt-param-scheduler": KnownFlag("the learning rate is always what the flags say"),
}
"""Taken, with a notice that says so."""

_OPTIMIZER = "the optimizer's states have the dtype of the main weights; give --megatron-fsdp-main-params-dtype"
_NO_DROPOUT = "nothing is dropped at random"

FIXED: Mapping[str, FixedFlag] = {
    "--hidden-dropout": FixedFlag(("0",), _NO_DROPOUT),
    "--attention-dropout": FixedFlag(("0",), _NO_DROPOUT),
    "--rotary-percent": FixedFlag(("1",), "all of a head is rotated"),
    "--rotary-seq-len-interpolation-factor": FixedFlag(("1",), "positions are not stretched; give --hf-config"),
    "--lr-warmup-init": FixedFlag(("0",), "the learning rate rises from 0"),
    "--lr-wsd-decay-style": FixedFlag(("linear",), "the fall at the end is a line"),
    "--weight-decay-incr-style": FixedFlag(("constant",), "weight decay stays the same"),
    "--dataloader-type": FixedFlag(("cyclic", "single"), "samples come in an order of their own, every one once"),
    "--expert-tensor-parallel-size": FixedFlag(("1",), "an expert is whole on its rank"),
    "--moe-router-load-balancing-type": FixedFlag(("none",), "no loss of balance is added"),
    "--moe-aux-loss-coeff": FixedFlag(("0",), "no loss of balance is added"),
    "--moe-z-loss-coeff": FixedFlag(("0",), "no loss of the router is added"),
    "--main-grads-dtype": FixedFlag(("fp32",), "give --megatron-fsdp-main-grads-dtype for another"),
    "--main-params-dtype": FixedFlag(("fp32",), "give --megatron-fsdp-main-params-dtype for another"),
    "--exp-avg-dtype": FixedFlag(("fp32",), _OPTIMIZER),
    "--exp-avg-sq-dtype": FixedFlag(("fp32",), _OPTIMIZER),
    "--dist-ckpt-strictness": FixedFlag(
        ("raise_all", "raise_unexpected"),
        "what does not fit is refused; give --no-strict-fsdp-dtensor-load to load what fits",
    ),
    "--rerun-mode": FixedFlag(("disabled",), "no step is computed twice"),
    "--cuda-graph-impl": FixedFlag(("none",), "no CUDA graph is captured"),
}
"""Taken with these values, with a notice; refused with others."""
