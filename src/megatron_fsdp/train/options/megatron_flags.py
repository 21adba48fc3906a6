"""Flags of Megatron-LM that are no options here: without effect, tied to one value, refused, or respelled.

A flag about speed, display or plumbing that this package does by other means is accepted, with a notice that it has
no effect (`EXPLAINED`). A flag that would change numbers is accepted if it asks for what happens anyway (`FIXED`).
All others are refused, with a remedy (`REFUSED`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from megatron_fsdp.errors import ConfigurationError


class FixedFlag(NamedTuple):
    """The values that may follow a flag, which ask for what happens anyway, and a reason: what happens, what to do."""

    values: tuple[str, ...]
    reason: str

    def require(self, flag: str, text: str) -> None:
        """Refuse a text that is none of the values, nor the same number as one."""
        with suppress(ValueError):
            if text in self.values or any(float(text) == float(value) for value in self.values):
                return
        allowed = " or ".join(self.values)
        raise ConfigurationError(f"invalid {flag} {text}: {self.reason}; give {allowed}, or leave it out")


class Spelling(NamedTuple):
    """The option that an alternative flag sets, and to what; None: to the value that follows the flag."""

    name: str
    value: Any = None


ALIASES: Mapping[str, Spelling] = {
    "--disable-bias-linear": Spelling("add_bias_linear", False),
    "--use-rotary-position-embeddings": Spelling("position_embedding_type", "rope"),
    "--recompute-activations": Spelling("recompute_granularity", "selective"),
    "--layernorm-epsilon": Spelling("norm_epsilon"),
    "--model-parallel-size": Spelling("tensor_model_parallel_size"),
}
"""Megatron-LM's spellings, those of earlier versions included, that do not follow from the names of the options."""

_WITHOUT_EFFECT: Mapping[str, str] = {
    "asks the network to reduce, which NCCL does by its own settings (NCCL_COLLNET_ENABLE)": "--use-sharp",
    "says where --use-sharp holds, which has no effect either": "--sharp-enabled-group=",
    "all communication has lanes of its own here": "--high-priority-stream-groups=",
    "NCCL takes NCCL_CONF_FILE": "--nccl-communicator-config-path=",
    "gathers and reductions travel in lanes of their own already": "--create-all-gather-group",
    "checkpoints need no group of their own": "--use-gloo-process-groups",
    "no group over gloo is made beside NCCL's but for the checkpoints": (
        "--disable-gloo-process-groups --no-use-gloo-process-groups"
    ),
    "pipeline stages reduce independently here": "--no-align-grad-reduce --disable-align-grad-reduce",
    "the schedule of the pipeline decides": (
        "--overlap-p2p-communication --no-overlap-p2p-communication --defer-embedding-wgrad-compute"
    ),
    "PyTorch's tensor parallelism decides what overlaps": "--tp-comm-overlap",
    "PyTorch's context parallelism decides what travels": "--cp-comm-type=",
    "transformers and PyTorch decide how tokens travel to experts": (
        "--overlap-moe-expert-parallel-comm --moe-permute-fusion --moe-token-dispatcher-type= "
        "--moe-flex-dispatcher-backend= --moe-enable-deepep"
    ),
    "each rank writes the shards that it holds": "--no-ckpt-fully-parallel-save --ckpt-fully-parallel-save",
    "each rank reads the shards that it holds, always": "--ckpt-fully-parallel-load",
    "ranks read what they hold": (
        "--ckpt-fully-parallel-load-exchange-algo= --ckpt-fully-parallel-load-process-group= "
        "--ckpt-fully-parallel-load-per-rank-objects"
    ),
    "no plan is made for a save that could be kept": "--ckpt-assume-constant-structure",
    "each rank writes one file": "--dist-ckpt-workers=",
    "--async-save has one way of its own": "--async-strategy=",
    "--async-save writes from a thread": "--use-persistent-ckpt-worker",
    "optimizer state is always saved so that any ranks can load it": "--dist-ckpt-optim-fully-reshardable",
    "states are never gathered to be saved": "--distrib-optim-fully-reshardable-mem-efficient",
    "the format of what is loaded is always looked at": "--auto-detect-ckpt-format",
    "a missing checkpoint ends the run, but where --load and --save agree": "--exit-on-missing-checkpoint",
    "the folder of results and that of checkpoints tell how far a run came": "--log-progress",
    "PyTorch chooses the kernels": (
        "--use-flash-attn --attention-backend= --no-masked-softmax-fusion --no-bias-gelu-fusion "
        "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm "
        "--apply-rope-fusion --cross-entropy-loss-fusion --cross-entropy-fusion-impl= --moe-grouped-gemm "
        "--moe-router-fusion"
    ),
    "the kernels of attention add up in float32": "--attention-softmax-in-fp32",
    "no CUDA graph is captured": "--te-rng-tracker",
    "throughput is always shown": "--log-throughput",
    "everything that is measured is written": (
        "--log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard "
        "--no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard"
    ),
    "the batch has one size in a run": "--log-batch-size-to-tensorboard",
    "the summary of a run tells it": "--log-world-size-to-tensorboard",
    "every step is written, at each --log-interval": "--tensorboard-log-interval=",
    "what is measured is written at each --log-interval": "--tensorboard-queue-size=",
    "the time of a step is always measured; `mfsdp trace` shows where it goes": (
        "--timing-log-level= --timing-log-option= --no-barrier-with-level-1-timing"
    ),
    "gradients leave while backward goes on, anyway": "--overlap-cpu-optimizer-d2h-h2d",
    "torch's optimizers step on the host anyway": "--use-torch-optimizer-for-cpu-offload",
    "there is no such logger": "--enable-one-logger --no-one-logger",
    "W&B's files lie in the folder of results": "--wandb-save-dir=",
    "--num-query-groups alone decides": "--group-query-attention",
    "SIGTERM always saves, where --save is given": "--exit-signal-handler",
    "there is one kind of model": "--use-mcore-models",
    "initial weights are the same for any number of ranks anyway": "--use-cpu-initialization",
    "nothing waits behind such a switch": "--enable-experimental",
    "token files are always mapped": "--no-mmap-bin-files",
    "attention is causal without a mask": "--no-create-attention-mask-in-dataloader",
    "the order of samples is computed, not built": "--num-dataset-builder-threads=",
    "Python's collector runs when it wants to": "--manual-gc --manual-gc-interval= --no-manual-gc-eval",
    "PyTorch's allocator keeps what it has": "--empty-unused-memory-level=",
    "the learning rate is always what the flags say": "--override-opt_param-scheduler --override-opt-param-scheduler",
}
"""Reason -> flags; those with `=` take one or more values."""

EXPLAINED: Mapping[str, str] = {
    flag.removesuffix("="): reason for reason, flags in _WITHOUT_EFFECT.items() for flag in flags.split()
}
"""Flags that are accepted, with a notice that they have no effect -> why."""

VALUED = frozenset(
    flag.removesuffix("=") for flags in _WITHOUT_EFFECT.values() for flag in flags.split() if flag.endswith("=")
)
"""Those of them that a value, or several, must follow."""

_OPTIMIZER = "the optimizer's states have the dtype of the main weights; give --megatron-fsdp-main-params-dtype"
_NO_DROPOUT = "nothing is dropped at random"

FIXED: Mapping[str, FixedFlag] = {
    "--hidden-dropout": FixedFlag(("0",), _NO_DROPOUT),
    "--attention-dropout": FixedFlag(("0",), _NO_DROPOUT),
    "--rotary-percent": FixedFlag(("1",), "all of a head is rotated"),
    "--rotary-seq-len-interpolation-factor": FixedFlag(("1",), "positions are not stretched; give --hf-config"),
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
"""Flags that are accepted with these values, with a notice, and refused with others."""

_NOT_HERE: Mapping[str, str] = {
    "it is not offered here; leave it out": (
        "--gtp-remat-reduce-scatter-with-fp32-accumulation --gtp-remat-nccl-ub --gtp-expert-remat-nccl-ub "
        "--hybrid-context-parallel --hierarchical-context-parallel-sizes --use-tp-pp-dp-mapping "
        "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
        "--pipeline-model-parallel-layout --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--enable-cuda-graph --external-cuda-graph --cuda-graph-scope --distribute-saved-activations --fp4-format "
        "--fp8-format --fp8-recipe --fp8-amax-history-len --fp8-amax-compute-algo --fp8-margin "
        "--fp16-lm-cross-entropy --fp32-residual-connection --apply-query-key-layer-scaling "
        "--data-parallel-random-init --load-main-params-from-ckpt --ckpt-drop-redundant-extra-state "
        "--dist-ckpt-save-pre-mcore-014 --reset-position-ids --reset-attention-mask --rampup-batch-size "
        "--recompute-modules --mtp-num-layers --mtp-loss-scaling-factor --moe-router-bias-update-rate "
        "--moe-router-dtype --moe-router-force-load-balancing --moe-expert-capacity-factor "
        "--moe-pad-expert-input-to-capacity --moe-single-grouped-weight --moe-single-grouped-bias"
    ),
    "the scale of the loss follows by itself; give --initial-loss-scale": (
        "--loss-scale --min-loss-scale --loss-scale-window --hysteresis"
    ),
    "nothing ever read it; give --outer-dp-sharding-strategy optim": "--enable-full-sharding-in-hsdp",
    "gathers begin when the optimizer has stepped; give --overlap-param-gather": (
        "--overlap-param-gather-with-optimizer-step"
    ),
    "`mfsdp describe` wraps a model as one rank of many without the others": "--fake-process-group",
    "states of the optimizer have the dtype of the main weights; give --megatron-fsdp-main-params-dtype": (
        "--use-precision-aware-optimizer"
    ),
    "set MFSDP_VERIFY_RANKS=1, which compares ranks in each step": "--check-weight-hash-across-dp-replicas-interval",
    "give PyTorch's own settings: CUBLAS_WORKSPACE_CONFIG=:4096:8 for matrix products": "--deterministic-mode",
    "weights are drawn from a normal distribution; give --init-method-std": (
        "--init-method-xavier-uniform --embedding-init-method-std"
    ),
    "give --skip-train to evaluate": "--freeze-all-layers",
    "convert with `mfsdp checkpoint convert`": (
        "--ckpt-convert-format --ckpt-convert-save --ckpt-convert-update-legacy-dist-opt-format"
    ),
    "name the checkpoint's folder: --load FOLDER/iter_0000010": "--override-ckpt-iteration --ckpt-step",
    "give --load FOLDER --finetune": "--pretrained-checkpoint",
    "give the same flags again, or keep them in a --config file": (
        "--use-checkpoint-args --use-mp-args-from-checkpoint-args --use-checkpoint-opt_param-scheduler"
    ),
    "give --ckpt-format fsdp_dtensor": "--use-dist-ckpt --dist-ckpt-format",
    "give --save-interval and --keep-last": (
        "--save-retain-interval --non-persistent-save-interval --non-persistent-ckpt-type "
        "--non-persistent-local-ckpt-dir"
    ),
    "SIGTERM saves and ends, and --load of the same folder goes on": "--adlr-autoresume",
    "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH (a tokenizer.json)": (
        "--tokenizer-name-or-path --vocab-file --merge-file --vocab-extra-ids"
    ),
    "give one --data-path, and --split for what is held out": (
        "--train-data-path --valid-data-path --test-data-path --data-args-path --per-split-data-args-path"
    ),
    "leave it and --data-path out: the source of the Python standard library is the text then": "--mock-data",
    "give --eval-iters, the global batches of an evaluation": "--full-validation",
    "weight decay stays the same; give --weight-decay": "--start-weight-decay --end-weight-decay",
    "all weights have one learning rate; give --lr and --min-lr": "--decoupled-lr --decoupled-min-lr",
    "every block offloads what it saves; give --cpu-offloading": "--cpu-offloading-num-layers",
    "give --recompute-granularity full": "--moe-layer-recompute",
    "give `mfsdp trace`, or PyTorch's profiler around `megatron_fsdp.train`": (
        "--log-straggler --profile --use-pytorch-profiler --profile-step-start --profile-step-end --profile-ranks"
    ),
    "give `mfsdp plan --json` for memory over a step": "--record-memory-history --memory-snapshot-path",
    "give --transformer-impl local or transformers": "--transformer-engine --spec",
    "give --normalization LayerNorm or RMSNorm": "--apply-layernorm-1p",
    "give --swiglu, or leave it out for GELU": "--squared-relu --openai-gelu --quick-geglu",
    "give --position-embedding-type": "--no-position-embedding",
    "such models come as a configuration: give --hf-config FILE, the config.json of the model": (
        "--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim "
        "--rotary-scaling-factor --original-max-position-embeddings --mscale --mscale-all-dim --use-rope-scaling "
        "--rope-scaling-factor --moe-layer-freq --moe-shared-expert-intermediate-size --moe-shared-expert-overlap "
        "--moe-router-score-function --moe-router-num-groups --moe-router-group-topk --moe-router-topk-scaling-factor "
        "--moe-router-pre-softmax --moe-router-enable-expert-bias"
    ),
}
"""Reason and remedy -> flags."""

REFUSED: Mapping[str, str] = {flag: reason for reason, flags in _NOT_HERE.items() for flag in flags.split()}
"""Flag -> reason and remedy."""
