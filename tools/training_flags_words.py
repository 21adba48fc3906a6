"""What docs/training_flags.md says beside what the code knows (pure data)."""

INTRODUCTION = """\
# The flags of `mfsdp train`

Made by `make pages` from the options; a test keeps it true.

    mfsdp train --preset tiny                                  # on this machine, ranks are started
    torchrun --nproc-per-node 8 pretrain_gpt.py --config run.yaml --lr 1e-4
    mfsdp plan --config run.yaml --ranks 64                    # what that would need

Flags have the names that Megatron-LM gives them. Later wins: defaults, then a preset (`--preset`), then a file
(`--config`), then flags. What a preset says gives way where it would contradict what you give (`--preset tiny
--use-torch-fsdp2`); what a file says does not, and both are named. The header of a run shows
where each value came from. Of a flag that is given twice the last one holds.

**Nothing is ignored.** A flag that is unknown is an error that names the nearest one, and all wrong flags are told at
once. A flag that would do nothing beside the others is an error that says what it lacks. Where usual scripts say such
things, and where something was adjusted, a notice stands in the header.

    $ mfsdp train --preset tiny --fsdp-doubel-buffer --mtp-num-layers 1
    error: --mtp-num-layers is not supported: it is not offered here; leave it out
    error: there is no flag --fsdp-doubel-buffer; did you mean --fsdp-double-buffer?
    $ mfsdp train --preset tiny --save-interval 10
    error: --save-interval does nothing without --save: give both, or leave it out

## A file

YAML or JSON with everything that flags can say, by name, with dashes or underscores; sections (`model:`, `training:`,
`ddp:`, ...) are for people. Fields of the engine have the name of their flag or of
`DistributedDataParallelConfig`. Switches are true or false; `no-...` and Megatron-LM's other spellings work too.
Whole numbers are decimal (1:30 is no number), a text that looks like a number needs quotes, null is an option that is
not given, and an option that stands twice is an error. All wrong names and values are told at once, each with its file:
`error: run.yaml: invalid --lr nan: give a finite number`.

    preset: tiny
    training: {global-batch-size: 32, bf16: true}
    ddp:
      data_parallel_sharding_strategy: optim_grads
      average_in_collective: true
    disable_bias_linear: true

## The environment

| variable | with | then |
|---|---|---|
| `CUDA_DEVICE_MAX_CONNECTIONS=1` | `--use-megatron-fsdp` or `--use-torch-fsdp2` on CUDA | error: unset it |
| the same | a CPU | notice: no effect |
"""

SECTION_WORDS = {
    "model": "Presets and `--hf-config` say most of it; see [models](training.md#models-and-engines).",
    "data": "See [data](training.md#data).",
    "reporting": "See [what a run shows](training.md#what-a-run-shows).",
    "recovery": "See [long runs](running.md).",
    "ddp": "How to shard and to reduce: the fields of `DistributedDataParallelConfig`. [Their rules](ddp_config.md) "
    "are checked before a run starts, for its ranks. The strategy without a flag is `optim_grads_params` with "
    "`--use-megatron-fsdp`, as on Megatron-LM's command line.",
}

DIFFERENT_DEFAULTS = [
    ("`--ckpt-format`", "`torch_dist`", "`fsdp_dtensor`", "the one that Megatron-FSDP writes and reads"),
    ("`--check-for-nan-in-loss-and-grad`", "on", "off", "a NaN is skipped and counted instead: `--max-nan-steps`"),
    ("`--align-param-gather`", "on", "off", "it has an effect with overlapped gathers of buckets only"),
    ("`--hidden-dropout`, `--attention-dropout`", "0.1", "0", "models are trained without dropout today"),
    ("`--tokenizer-type`", "none", "`byte`", "a run needs no files"),
    ("`--split`", "`969,30,1`", "`95,5`", "there are two parts"),
    ("`--eval-interval`", "1000", "none", "held-out loss is measured at the end in any case"),
    ("`--eval-iters`", "100", "2", "global batches; the last evaluation takes four times as many"),
    ("`--log-interval`", "100", "5", "every step is written to the files, whatever the interval"),
    ("`--distributed-backend`", "`nccl`", "`auto`", "what fits the device: gloo on a CPU"),
]

RULES = [
    (
        "`--overlap-param-gather`",
        "needs a sharded optimizer and `--overlap-grad-reduce`",
        "error without a sharded optimizer; needs no overlapped reduction",
    ),
    ("`--overlap-param-gather-with-optimizer-step`", "needs interleaved pipelines", "refused"),
    ("pipeline without interleaving", "sets `align_param_gather` off", "it is off unless said"),
    (
        "`--use-torch-fsdp2`",
        (
            "refuses pipelines, experts, the distributed optimizer, fusion, fp16, tied embeddings, some "
            "formats, `CUDA_DEVICE_MAX_CONNECTIONS=1`"
        ),
        (
            "pipelines and experts work; fields of `DistributedDataParallelConfig` "
            "are errors, as are fusion and `CUDA_DEVICE_MAX_CONNECTIONS=1` on CUDA"
        ),
    ),
    (
        "`--use-megatron-fsdp`",
        "sets `use_custom_fsdp`, `reuse_grad_buf_for_mxfp8_param_ag`",
        "`--use-custom-fsdp` is the former name, with a notice; the other is an error",
    ),
    (
        "the same, version 1",
        "sets `--use-distributed-optimizer`",
        "the strategy decides; a notice where the flag is given",
    ),
    ("the same, version 2", "refuses `--use-distributed-optimizer`", "error: there is one engine, version 1"),
    (
        "the same",
        (
            "refuses grouped expert weights, other optimizers than SGD and Adam, `CUDA_DEVICE_MAX_CONNECTIONS=1`, "
            "other formats than fsdp_dtensor"
        ),
        "the same are errors",
    ),
    ("ZeRO-2/3 with gradient-accumulation fusion", "warns", "error: fusion is not there; `--no-...` is a notice"),
    ("ZeRO-3 with weight hashes", "error", "refused; `MFSDP_VERIFY_RANKS=step` compares ranks"),
    (
        "`--use-nccl-ub`",
        "sets manual registration and double buffer",
        "double buffer, with a notice; nothing is registered",
    ),
    ("`--megatron-fsdp-max-pool-double-buffer`", "sets the double buffer", "the same; it is what the flag means"),
    ("`--init-model-with-meta-device` and `no_shard`", "error", "error"),
    ("`--fsdp-manual-registration`", "needs `--use-nccl-ub`", "error without it, else a notice"),
    (
        "`--ckpt-format fsdp_dtensor`",
        "needs Megatron-FSDP",
        "all engines write it, on any ranks",
    ),
    ("`--ckpt-format torch_dcp`", "needs FSDP2", "error: only fsdp_dtensor"),
    ("`--fp8-param-gather`", "needs a sharded optimizer or FSDP", "error: not implemented"),
    ("`--fp4-param-gather`", "needs fp4", "error: not implemented"),
    (
        "`--bf16`",
        "sets `--accumulate-allreduce-grads-in-fp32` unless `--grad-reduce-in-bf16`",
        (
            "the same without changing "
            "a flag: gradients travel and accumulate in float32; with `--grad-reduce-in-bf16` they travel in bfloat16"
        ),
    ),
    (
        "`--accumulate-allreduce-grads-in-fp32`",
        "sets fp32 accumulation of reduce-scatters off",
        "error: `--ddp-reduce-scatter-with-fp32-accumulation` does nothing where gradients travel in float32",
    ),
    ("`--fp16` with a dynamic scale", "sets the NaN check off", "error where the check was asked for; it is off else"),
    (
        "`--use-precision-aware-optimizer`",
        "Adam and a sharded optimizer only; the dtypes need it",
        "refused; the dtypes may be fp32",
    ),
    ("other optimizers", "layer-wise mode", "SGD and Adam only"),
    ("`--hybrid-context-parallel`", "error with Megatron-FSDP", "refused"),
    (
        "tensor- or context-parallel ranks before Blackwell",
        "warns of `CUDA_DEVICE_MAX_CONNECTIONS`",
        "nothing is said: fully sharded ranks must not have 1",
    ),
    (
        "FSDP2, or Blackwell",
        "sets streams of high priority",
        "communication has lanes of its own; `--high-priority-stream-groups` is a notice",
    ),
    ("weights cut over an axis of their own (GTP)", "errors", "its flags are refused"),
    ("CUDA graphs", "need the NaN check off", "refused"),
    ("no groups over gloo", "need a distributed format", "notice: no effect"),
    ("`--freeze-all-layers`", "sets sharding off", "refused"),
    ("`--load-main-params-from-ckpt`", "needs `--no-load-optim`", "refused: main weights are always loaded"),
    (
        "`--skip-train`",
        "sets `--no-load-optim`",
        "not set: give it where the checkpoint has no optimizer; flags about steps are notices",
    ),
    ("`--async-save` without a persistent worker", "sets it off", "works: a thread writes"),
    ("`--delay-wgrad-compute`", "needs Transformer Engine", "works with buckets; error with `--use-megatron-fsdp`"),
    ("`--ddp-average-in-collective` and `--calculate-per-token-loss`", "error", "error"),
    ("`--ddp-num-buckets` and `--ddp-bucket-size`", "error; above 0", "error; above 0"),
    ("patterns of float32 accumulation and `--accumulate-allreduce-grads-in-fp32`", "error", "error"),
    (
        "`--use-nccl-ub` and `expandable_segments:True`",
        "error before torch 2.11",
        "nothing: torch 2.11 is required, and nothing is registered",
    ),
    ("`--reuse-grad-buf-for-mxfp8-param-ag`", "needs `--fp8-param-gather`", "error"),
    (
        "outer `optim` and an inner strategy below 3",
        "error in one of two interfaces",
        "works for strategies 1 to 3; error where there is one instance, or for `no_shard`",
    ),
    ("`--num-distributed-optimizer-instances` that does not divide", "error", "error, with the divisors"),
    ("`--overlap-grad-reduce` and a `no_sync_func`", "error", "not applicable: there is no such function"),
    (
        "ZeRO-2/3 without overlap",
        "written into the caller's configuration",
        (
            "a notice where `--no-overlap-grad-reduce` or "
            "`--no-overlap-param-gather` was said; nobody's configuration is written to"
        ),
    ),
    ("version 2 with other parallelisms", "errors", "not applicable: there is one engine"),
    ("overlapped expert parallelism and double buffer", "error", "`--overlap-moe-expert-parallel-comm` is a notice"),
]
