"""Flags of Megatron-LM that are refused, with the reason and what to do. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

_ARCHITECTURE = "such models come as a configuration: give --hf-config FILE, the config.json of the model"
_SAMPLES = "samples = steps x --global-batch-size"
_TOKENIZER = "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH (a tokenizer.json)"
_DATA = "give one --data-path, and --split for what is held out"
_PACKED = "samples are packed, and attention sees all of a sample"
_TRACE = "give `mfsdp trace`, or PyTorch's profiler around `megatron_fsdp.train`"
_FLOAT8 = "float8 weights are not implemented; leave it out"
_GRAPHS = "CUDA graphs are not implemented; leave it out"
_REMAT = "weights are not cut over an axis of their own here; leave it out"
_SCALE = "the scale of the loss follows by itself from --initial-loss-scale; leave it out"
_CONVERT = "convert with `mfsdp checkpoint convert`"
_LAYERS = "layers are shared out evenly by PyTorch's pipeline; leave it out"
_ARGUMENTS = "give the same flags again, or keep them in a --config file"

REFUSED: Mapping[str, str] = {
    # Engines and communication
    "--enable-full-sharding-in-hsdp": "nothing ever read it; give --outer-dp-sharding-strategy optim",
    "--overlap-param-gather-with-optimizer-step": "gathers begin when the optimizer has stepped; give "
    "--overlap-param-gather",
    "--gtp-remat-reduce-scatter-with-fp32-accumulation": _REMAT,
    "--gtp-remat-nccl-ub": _REMAT,
    "--gtp-expert-remat-nccl-ub": _REMAT,
    "--hybrid-context-parallel": "sequences are cut over all context-parallel ranks alike; leave it out",
    "--hierarchical-context-parallel-sizes": "context-parallel ranks are one group; leave it out",
    "--use-tp-pp-dp-mapping": "ranks lie pipeline by data by context by tensor, always; leave it out",
    "--fake-process-group": "`mfsdp plan --check` runs one rank of many without the others",
    "--num-layers-per-virtual-pipeline-stage": "interleaved pipelines are not offered by the trainer; leave it out",
    "--num-virtual-stages-per-pipeline-rank": "interleaved pipelines are not offered by the trainer; leave it out",
    "--pipeline-model-parallel-layout": _LAYERS,
    "--decoder-first-pipeline-num-layers": _LAYERS,
    "--decoder-last-pipeline-num-layers": _LAYERS,
    "--account-for-embedding-in-pipeline-split": _LAYERS,
    "--account-for-loss-in-pipeline-split": _LAYERS,
    "--enable-cuda-graph": _GRAPHS,
    "--external-cuda-graph": _GRAPHS,
    "--cuda-graph-scope": _GRAPHS,
    # Precision
    "--use-precision-aware-optimizer": "states of the optimizer have the dtype of the main weights; give "
    "--megatron-fsdp-main-params-dtype",
    "--optimizer-cpu-offload": "states of the optimizer stay on the device; leave it out",
    "--optimizer-offload-fraction": "states of the optimizer stay on the device; leave it out",
    "--overlap-cpu-optimizer-d2h-h2d": "states of the optimizer stay on the device; leave it out",
    "--fp4-format": "4-bit weights are not implemented; leave it out",
    "--fp8-format": _FLOAT8,
    "--fp8-recipe": _FLOAT8,
    "--fp8-amax-history-len": _FLOAT8,
    "--fp8-amax-compute-algo": _FLOAT8,
    "--fp8-margin": _FLOAT8,
    "--loss-scale": _SCALE,
    "--min-loss-scale": _SCALE,
    "--loss-scale-window": _SCALE,
    "--hysteresis": _SCALE,
    "--fp16-lm-cross-entropy": "the loss is computed in float32; leave it out",
    "--fp32-residual-connection": "a model computes in one dtype; leave it out",
    "--apply-query-key-layer-scaling": "the kernels of attention add up in float32; leave it out",
    # Checks and initial weights
    "--data-parallel-random-init": "initial weights are the same for any number of ranks here; leave it out",
    "--check-weight-hash-across-dp-replicas-interval": "give MFSDP_VERIFY_RANKS=step, which compares ranks each step",
    "--deterministic-mode": "give PyTorch's own settings: CUBLAS_WORKSPACE_CONFIG=:4096:8 for matrix products",
    "--init-method-xavier-uniform": "weights are drawn from a normal distribution; give --init-method-std",
    "--freeze-all-layers": "there would be nothing to train; give --skip-train to evaluate",
    # Checkpoints
    "--load-main-params-from-ckpt": "main weights are what a checkpoint holds, so they are always loaded; leave it out",
    "--ckpt-convert-format": _CONVERT,
    "--ckpt-convert-save": _CONVERT,
    "--ckpt-convert-update-legacy-dist-opt-format": _CONVERT,
    "--ckpt-drop-redundant-extra-state": "no extra state is saved that could be dropped; leave it out",
    "--dist-ckpt-save-pre-mcore-014": "nothing ever read it; leave it out",
    "--override-ckpt-iteration": "name the checkpoint's folder: --load FOLDER/iter_0000010",
    "--ckpt-step": "name the checkpoint's folder: --load FOLDER/iter_0000010",
    "--pretrained-checkpoint": "give --load FOLDER --finetune",
    "--use-checkpoint-args": _ARGUMENTS,
    "--use-mp-args-from-checkpoint-args": _ARGUMENTS,
    "--use-checkpoint-opt_param-scheduler": _ARGUMENTS,
    "--use-dist-ckpt": "give --ckpt-format fsdp_dtensor",
    "--dist-ckpt-format": "give --ckpt-format fsdp_dtensor",
    "--save-retain-interval": "give --keep-last",
    "--non-persistent-save-interval": "give --save-interval and --keep-last",
    "--non-persistent-ckpt-type": "give --save-interval and --keep-last",
    "--non-persistent-local-ckpt-dir": "give --save-interval and --keep-last",
    "--adlr-autoresume": "SIGTERM saves and ends, and --load of the same folder goes on",
    # Data
    "--tokenizer-name-or-path": _TOKENIZER,
    "--vocab-file": _TOKENIZER,
    "--merge-file": _TOKENIZER,
    "--vocab-extra-ids": _TOKENIZER,
    "--train-data-path": _DATA,
    "--valid-data-path": _DATA,
    "--test-data-path": _DATA,
    "--data-args-path": _DATA,
    "--per-split-data-args-path": _DATA,
    "--mock-data": "leave it and --data-path out: the source of the Python standard library is the text then",
    "--reset-position-ids": f"{_PACKED}; leave it out",
    "--reset-attention-mask": f"{_PACKED}; leave it out",
    "--full-validation": "give --eval-iters, the global batches of an evaluation",
    # Steps and learning rate
    "--train-samples": f"use --train-iters; {_SAMPLES}",
    "--lr-decay-samples": f"use --lr-decay-iters; {_SAMPLES}",
    "--lr-warmup-samples": f"use --lr-warmup-iters; {_SAMPLES}",
    "--lr-wsd-decay-samples": f"use --lr-wsd-decay-iters; {_SAMPLES}",
    "--rampup-batch-size": "the batch has one size in a run; leave it out",
    "--start-weight-decay": "weight decay stays the same; give --weight-decay",
    "--end-weight-decay": "weight decay stays the same; give --weight-decay",
    "--decoupled-lr": "all weights have one learning rate; give --lr",
    "--decoupled-min-lr": "all weights have one learning rate; give --min-lr",
    # Recomputation
    "--recompute-modules": "--recompute-granularity selective recomputes the core of attention; leave it out",
    "--distribute-saved-activations": "activations are kept whole; leave it out",
    "--cpu-offloading": "activations stay on the device; give --recompute-granularity",
    "--cpu-offloading-num-layers": "activations stay on the device; give --recompute-granularity",
    # Display
    "--log-params-norm": "give `mfsdp checkpoint inspect` for norms of weights",
    "--log-num-zeros-in-grad": "gradients are not counted; leave it out",
    "--log-straggler": _TRACE,
    "--profile": _TRACE,
    "--use-pytorch-profiler": _TRACE,
    "--profile-step-start": _TRACE,
    "--profile-step-end": _TRACE,
    "--profile-ranks": _TRACE,
    "--record-memory-history": "give `mfsdp plan --picture` for memory over a step",
    "--memory-snapshot-path": "give `mfsdp plan --picture` for memory over a step",
    # Models
    "--transformer-engine": "give --transformer-impl local or transformers",
    "--spec": "give --transformer-impl local or transformers",
    "--apply-layernorm-1p": "give --normalization LayerNorm or RMSNorm",
    "--squared-relu": "give --swiglu, or leave it out for GELU",
    "--openai-gelu": "give --swiglu, or leave it out for GELU",
    "--quick-geglu": "give --swiglu, or leave it out for GELU",
    "--embedding-init-method-std": "give --init-method-std, which holds for all matrices",
    "--no-position-embedding": "give --position-embedding-type",
    "--multi-latent-attention": _ARCHITECTURE,
    "--q-lora-rank": _ARCHITECTURE,
    "--kv-lora-rank": _ARCHITECTURE,
    "--qk-head-dim": _ARCHITECTURE,
    "--qk-pos-emb-head-dim": _ARCHITECTURE,
    "--v-head-dim": _ARCHITECTURE,
    "--rotary-scaling-factor": _ARCHITECTURE,
    "--original-max-position-embeddings": _ARCHITECTURE,
    "--mscale": _ARCHITECTURE,
    "--mscale-all-dim": _ARCHITECTURE,
    "--use-rope-scaling": _ARCHITECTURE,
    "--rope-scaling-factor": _ARCHITECTURE,
    "--mtp-num-layers": "the layer that predicts a second token is not trained; leave it out",
    "--mtp-loss-scaling-factor": "the layer that predicts a second token is not trained; leave it out",
    "--moe-layer-freq": _ARCHITECTURE,
    "--moe-layer-recompute": "give --recompute-granularity full",
    "--moe-shared-expert-intermediate-size": _ARCHITECTURE,
    "--moe-shared-expert-overlap": _ARCHITECTURE,
    "--moe-router-score-function": _ARCHITECTURE,
    "--moe-router-num-groups": _ARCHITECTURE,
    "--moe-router-group-topk": _ARCHITECTURE,
    "--moe-router-topk-scaling-factor": _ARCHITECTURE,
    "--moe-router-pre-softmax": _ARCHITECTURE,
    "--moe-router-enable-expert-bias": _ARCHITECTURE,
    "--moe-router-bias-update-rate": "biases of the router stay as they are; leave it out",
    "--moe-router-dtype": "the model's own classes decide the dtype of its router; leave it out",
    "--moe-router-force-load-balancing": "tokens go where the router sends them; leave it out",
    "--moe-expert-capacity-factor": "no token is dropped; leave it out",
    "--moe-pad-expert-input-to-capacity": "no token is dropped; leave it out",
    "--moe-single-grouped-weight": "experts have the weights of the model's own classes; leave it out",
    "--moe-single-grouped-bias": "experts have the weights of the model's own classes; leave it out",
}
"""Flag -> why not, and what to do."""
