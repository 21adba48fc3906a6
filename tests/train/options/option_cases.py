"""For every option and every field of `DistributedDataParallelConfig`: words, and what they change in the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp.ddp.bucket_schedule import GatherMode
from megatron_fsdp.ddp.resolve import ResolvedDDP, resolve_ddp
from megatron_fsdp.placement import ShardingStrategy
from megatron_fsdp.train.options.job import Job, World

RANKS = 8
NUMEL = 1000
RUN = "--seq-length 64 --micro-batch-size 1 --train-iters 20 --lr 0.01"
SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
UNITS = f"{RUN} {SHAPE} --bf16 --use-megatron-fsdp"
BUCKETS = f"{RUN} {SHAPE} --bf16"
FLOAT32 = f"{RUN} {SHAPE} --use-megatron-fsdp"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
TRANSFORMERS = f"{UNITS} {LLAMA} --transformer-impl transformers"
FSDP2 = f"{RUN} {SHAPE} {LLAMA} --bf16 --use-torch-fsdp2 --transformer-impl transformers"
EXPERTS = f"{TRANSFORMERS} --num-experts 8"


@dataclass(frozen=True)
class Case:
    """One option.

    Attributes:
        words: What is added to the command line.
        seen: What is looked at in the job.
        expected: What it is then; it is something else without the words.
        start: The command line without them.
        proved: Where a run shows the effect, beside `test_options_in_runs.py`.
        world: Ranks and hardware.
    """

    words: str
    seen: Callable[[Job], Any]
    expected: Any
    start: str = UNITS
    proved: str = ""
    world: World = field(default_factory=lambda: World(RANKS, "cuda", multiplies_bf16=True))


def resolved(job: Job) -> ResolvedDDP:
    """What the engine makes of the configuration."""
    return resolve_ddp(job.ddp, job.sizes.data * job.sizes.context, NUMEL)


def engine(name: str) -> Callable[[Job], Any]:
    """A field of the configuration that units and buffers get."""
    return lambda job: getattr(resolved(job).engine_config, name)


def rate(step: int) -> Callable[[Job], float]:
    """The learning rate of a step."""
    return lambda job: round(job.schedule.rate(step), 9)


def of(section: str, name: str) -> Callable[[Job], Any]:
    """An option as the job has it."""
    return lambda job: getattr(getattr(job.options, section), name)


def notices(job: Job) -> tuple[str, ...]:
    """What is told."""
    return job.notices


def _plain(section: str, start: str, proved: str, values: Mapping[str, tuple[str, Any]]) -> dict[str, Case]:
    """Options whose value other parts of the trainer read from the job."""
    return {name: Case(words, of(section, name), expected, start, proved) for name, (words, expected) in values.items()}


_MODEL = _plain(
    "model",
    RUN,
    "tests/train/models",
    {
        "num_layers": ("--num-layers 3", 3),
        "hidden_size": ("--hidden-size 32", 32),
        "ffn_hidden_size": ("--ffn-hidden-size 96", 96),
        "num_attention_heads": ("--num-attention-heads 2", 2),
        "num_query_groups": ("--num-query-groups 2", 2),
        "kv_channels": ("--kv-channels 8", 8),
        "max_position_embeddings": ("--max-position-embeddings 128", 128),
        "position_embedding_type": ("--position-embedding-type rope", "rope"),
        "normalization": ("--normalization RMSNorm", "RMSNorm"),
        "norm_epsilon": ("--norm-epsilon 1e-6", 1e-6),
        "qk_layernorm": ("--qk-layernorm", True),
        "swiglu": ("--swiglu", True),
        "add_bias_linear": ("--disable-bias-linear", False),
        "untie_embeddings_and_output_weights": ("--untie-embeddings-and-output-weights", True),
        "init_method_std": ("--init-method-std 0.01", 0.01),
        "make_vocab_size_divisible_by": ("--make-vocab-size-divisible-by 64", 64),
        "hf_config": ("--hf-config a/config.json", Path("a/config.json")),
        "hf_model": ("--hf-model a", Path("a")),
    },
) | {
    "transformer_impl": Case(
        "--transformer-impl transformers",
        of("model", "transformer_impl"),
        "transformers",
        f"{UNITS} {LLAMA}",
        "tests/train/models",
    ),
    "seq_length": Case("--seq-length 32", lambda job: (job.seq_length, job.tokens_per_step), (32, 256)),
    "rotary_base": Case(
        "--rotary-base 5e5",
        of("model", "rotary_base"),
        5e5,
        f"{UNITS} --position-embedding-type rope",
        "tests/train/models",
    ),
    "num_experts": Case("--num-experts 4", of("model", "num_experts"), 4, TRANSFORMERS, "tests/train/models"),
    "moe_router_topk": Case("--moe-router-topk 1", of("model", "moe_router_topk"), 1, EXPERTS, "tests/train/models"),
    "moe_ffn_hidden_size": Case(
        "--moe-ffn-hidden-size 96", of("model", "moe_ffn_hidden_size"), 96, EXPERTS, "tests/train/models"
    ),
}

_PARALLEL = {
    "tensor_model_parallel_size": Case(
        "--tensor-model-parallel-size 2", lambda job: (job.sizes.tensor, job.sizes.data), (2, 4), TRANSFORMERS
    ),
    "pipeline_model_parallel_size": Case(
        "--pipeline-model-parallel-size 2", lambda job: (job.sizes.pipeline, job.sizes.data), (2, 4), FSDP2
    ),
    "context_parallel_size": Case(
        "--context-parallel-size 2", lambda job: (job.sizes.context, job.sizes.data), (2, 4), TRANSFORMERS
    ),
    "expert_model_parallel_size": Case(
        "--expert-model-parallel-size 2",
        lambda job: (job.sizes.expert, job.sizes.data),
        (2, 8),
        f"{FSDP2} --num-experts 8",
    ),
    "sequence_parallel": Case(
        "--sequence-parallel",
        of("parallel", "sequence_parallel"),
        True,
        f"{TRANSFORMERS} --tensor-model-parallel-size 2",
        "tests/train/engines",
    ),
    "use_torch_fsdp2": Case("--use-torch-fsdp2", lambda job: job.engine, "torch_fsdp2", f"{RUN} {SHAPE}"),
    "torch_fsdp2_no_reshard_after_forward": Case(
        "--torch-fsdp2-no-reshard-after-forward",
        of("parallel", "torch_fsdp2_no_reshard_after_forward"),
        True,
        FSDP2,
        "tests/train/engines",
    ),
    **_plain(
        "parallel",
        UNITS,
        "tests/train/launch",
        {
            "init_model_with_meta_device": ("--init-model-with-meta-device", True),
            "device": ("--device cpu", "cpu"),
            "distributed_backend": ("--distributed-backend gloo", "gloo"),
            "distributed_timeout_minutes": ("--distributed-timeout-minutes 2.5", 2.5),
        },
    ),
    "nproc": Case("--nproc 4", notices, ("--nproc 4 has no effect: 8 ranks were started",)),
}

_TRAINING = {
    "micro_batch_size": Case("--micro-batch-size 2", lambda job: (job.batch.micro, job.batch.total), (2, 16)),
    "global_batch_size": Case("--global-batch-size 24", lambda job: (job.batch.total, job.batch.microbatches), (24, 3)),
    "train_iters": Case("--train-iters 30", lambda job: (job.train_iters, job.schedule.decay_steps), (30, 30)),
    "bf16": Case("--bf16", lambda job: job.dtype, torch.bfloat16, FLOAT32),
    "fp16": Case("--fp16", lambda job: job.dtype, torch.float16, FLOAT32),
    "auto_bf16": Case("--auto-bf16", lambda job: job.dtype, torch.bfloat16, FLOAT32),
    "grad_reduce_in_bf16": Case(
        "--grad-reduce-in-bf16",
        lambda job: (resolved(job).policy.grad_comm_dtype, resolved(job).policy.main_grads_dtype),
        (torch.bfloat16, torch.float32),
    ),
    "initial_loss_scale": Case(
        "--initial-loss-scale 1024",
        of("training", "initial_loss_scale"),
        1024.0,
        f"{FLOAT32} --fp16",
        "tests/train/engines",
    ),
    "gradient_accumulation_fusion": Case(
        "--no-gradient-accumulation-fusion",
        notices,
        ("--no-gradient-accumulation-fusion: it is off in any case in this version",),
    ),
    "recompute_granularity": Case(
        "--recompute-granularity full", of("training", "recompute_granularity"), "full", UNITS, "tests/train/models"
    ),
    "recompute_num_layers": Case(
        "--recompute-num-layers 1",
        of("training", "recompute_num_layers"),
        1,
        f"{UNITS} --recompute-granularity full",
        "tests/train/models",
    ),
    "recompute_method": Case(
        "--recompute-method uniform",
        of("training", "recompute_num_layers"),
        None,
        f"{UNITS} --recompute-granularity full --recompute-num-layers 1",
    ),
    **_plain(
        "training",
        UNITS,
        "",
        {
            "exit_interval": ("--exit-interval 7", 7),
            "exit_duration_in_mins": ("--exit-duration-in-mins 1", 1.0),
            "seed": ("--seed 5", 5),
            "calculate_per_token_loss": ("--calculate-per-token-loss", True),
            "eval_interval": ("--eval-interval 4", 4),
            "eval_iters": ("--eval-iters 3", 3),
            "skip_train": ("--skip-train", True),
        },
    ),
}

_OPTIMIZER = {
    "lr": Case("--lr 0.02", rate(0), 0.019),
    "min_lr": Case("--min-lr 0.005", rate(19), 0.005),
    "lr_decay_style": Case("--lr-decay-style constant", rate(10), 0.01),
    "lr_decay_iters": Case("--lr-decay-iters 40", rate(19), 0.005),
    "lr_warmup_iters": Case("--lr-warmup-iters 4", rate(0), 0.0025),
    "lr_warmup_fraction": Case("--lr-warmup-fraction 0.5", rate(0), 0.001),
    "lr_wsd_decay_iters": Case(
        "--lr-wsd-decay-iters 10", rate(12), 0.007, f"{UNITS} --lr-decay-style WSD --lr-wsd-decay-iters 5"
    ),
    **_plain(
        "optimizer",
        UNITS,
        "",
        {
            "optimizer": ("--optimizer sgd", "sgd"),
            "weight_decay": ("--weight-decay 0.5", 0.5),
            "adam_beta1": ("--adam-beta1 0.5", 0.5),
            "adam_beta2": ("--adam-beta2 0.9", 0.9),
            "adam_eps": ("--adam-eps 1e-4", 1e-4),
            "clip_grad": ("--clip-grad 0.1", 0.1),
        },
    ),
    **_plain("optimizer", f"{UNITS} --optimizer sgd", "", {"sgd_momentum": ("--sgd-momentum 0.5", 0.5)}),
}

_DATA = _plain(
    "data",
    UNITS,
    "tests/train/data",
    {
        "data_path": ("--data-path text", Path("text")),
        "tokenizer_type": ("--tokenizer-type bpe", "bpe"),
        "split": ("--split 90,10", "90,10"),
        "eod_mask_loss": ("--eod-mask-loss", True),
        "num_workers": ("--num-workers 2", 2),
    },
) | {
    **_plain("data", f"{UNITS} --data-path text", "tests/train/data", {"json_key": ("--json-key body", "body")}),
    **_plain(
        "data", f"{UNITS} --data-path text", "tests/train/data", {"data_cache_path": ("--data-cache-path c", Path("c"))}
    ),
    **_plain(
        "data",
        f"{UNITS} --tokenizer-type HuggingFaceTokenizer --tokenizer-model s.json",
        "tests/train/data",
        {"tokenizer_model": ("--tokenizer-model t.json", Path("t.json"))},
    ),
    **_plain("data", f"{UNITS} --tokenizer-type bpe", "tests/train/data", {"vocab_size": ("--vocab-size 300", 300)}),
}

_CHECKPOINT = {
    "save": Case(
        "--save c",
        lambda job: (job.options.checkpoint.save, job.load_is_optional),
        (Path("c"), True),
        world=World(RANKS, "cuda", multiplies_bf16=True, restarts=1),
        proved="tests/train/recovery",
    ),
    "load": Case(
        "--load c",
        lambda job: (job.options.checkpoint.load, job.load_is_optional),
        (Path("c"), True),
        f"{UNITS} --save c",
        "tests/train/recovery",
    ),
    "ckpt_format": Case("--ckpt-format torch_dist", notices, "--ckpt-format torch_dist is not written or read"),
    **_plain(
        "checkpoint",
        f"{UNITS} --save c",
        "tests/train/recovery",
        {
            "save_interval": ("--save-interval 5", 5),
            "keep_last": ("--keep-last 2", 2),
            "async_save": ("--async-save", True),
            "no_save_optim": ("--no-save-optim", True),
            "no_save_rng": ("--no-save-rng", True),
        },
    ),
    **_plain(
        "checkpoint",
        f"{UNITS} --load c",
        "tests/train/recovery",
        {
            "finetune": ("--finetune", True),
            "no_load_optim": ("--no-load-optim", True),
            "no_load_rng": ("--no-load-rng", True),
            "strict_fsdp_dtensor_load": ("--no-strict-fsdp-dtensor-load", False),
            "verify_integrity": ("--verify-integrity", True),
        },
    ),
    **_plain(
        "checkpoint",
        UNITS,
        "tests/train/recovery",
        {"dump_param_to_param_group_map": ("--dump-param-to-param-group-map m", Path("m"))},
    ),
}

_REPORTING = _plain(
    "reporting",
    UNITS,
    "tests/train/reporting",
    {
        "out": ("--out o", Path("o")),
        "log_interval": ("--log-interval 2", 2),
        "log_exposed_communication": ("--no-log-exposed-communication", False),
        "tensorboard_dir": ("--tensorboard-dir t", Path("t")),
        "wandb_project": ("--wandb-project w", "w"),
        "mlflow_tracking_uri": ("--mlflow-tracking-uri file:m", "file:m"),
        "peak_tflops": ("--peak-tflops 100", 100.0),
        "prompt": ("--prompt class", "class"),
        "sample_tokens": ("--sample-tokens 10", 10),
    },
)

_RECOVERY = _plain(
    "recovery",
    UNITS,
    "tests/train/recovery",
    {
        "max_restarts": ("--max-restarts 2", 2),
        "max_nan_steps": ("--max-nan-steps 0", 0),
        "hang_timeout_minutes": ("--hang-timeout-minutes 1", 1.0),
    },
) | _plain("recovery", f"{UNITS} --save c", "tests/train/recovery", {"max_failed_saves": ("--max-failed-saves 1", 1)})

OPTION_CASES: Mapping[str, Case] = {
    **_MODEL,
    **_PARALLEL,
    **_TRAINING,
    **_OPTIMIZER,
    **_DATA,
    **_CHECKPOINT,
    **_REPORTING,
    **_RECOVERY,
}
"""By the name of the option."""

_DOUBLED = "gathered weights lie in two buffers that are kept, as with --fsdp-double-buffer"
_UNREGISTERED = "buffers are not registered with NCCL by this version"
_NCCL = f"--use-nccl-ub: {_UNREGISTERED}; {_DOUBLED}"

FIELD_CASES: Mapping[str, Case] = {
    "grad_reduce_in_fp32": Case(
        "--accumulate-allreduce-grads-in-fp32",
        notices,
        (
            "--accumulate-allreduce-grads-in-fp32 has no effect of its own: gradients travel and accumulate in float32, "
            "unless --grad-reduce-in-bf16 or the flags of dtypes say something else",
        ),
    ),
    "overlap_grad_reduce": Case(
        "--overlap-grad-reduce", lambda job: resolved(job).bucket_numel, 40_000_000, start=BUCKETS
    ),
    "overlap_param_gather": Case(
        "--overlap-param-gather",
        lambda job: resolved(job).gather_mode,
        GatherMode.IN_TURN,
        f"{BUCKETS} --use-distributed-optimizer",
    ),
    "align_param_gather": Case(
        "--align-param-gather",
        lambda job: resolved(job).gather_mode,
        GatherMode.TOGETHER,
        f"{BUCKETS} --use-distributed-optimizer --overlap-param-gather",
    ),
    "use_distributed_optimizer": Case(
        "--use-distributed-optimizer", lambda job: resolved(job).strategy, ShardingStrategy.optim, BUCKETS
    ),
    "num_distributed_optimizer_instances": Case(
        "--num-distributed-optimizer-instances 2", lambda job: resolved(job).num_instances, 2
    ),
    "check_for_nan_in_grad": Case("--check-for-nan-in-loss-and-grad", engine("check_for_nan_in_grad"), True),
    "check_for_large_grads": Case("--check-for-large-grads", engine("check_for_large_grads"), True),
    "bucket_size": Case("--ddp-bucket-size 100", lambda job: resolved(job).bucket_numel, 100, BUCKETS),
    "num_buckets": Case("--ddp-num-buckets 4", lambda job: resolved(job).bucket_numel, 250, BUCKETS),
    "pad_buckets_for_high_nccl_busbw": Case(
        "--ddp-pad-buckets-for-high-nccl-busbw", lambda job: resolved(job).numel_multiple, 65536, BUCKETS
    ),
    "reduce_scatter_with_fp32_accumulation": Case(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        engine("reduce_scatter_with_fp32_accumulation"),
        True,
        f"{UNITS} --grad-reduce-in-bf16",
    ),
    "param_name_patterns_for_fp32_local_accumulation": Case(
        "--ddp-param-name-patterns-for-fp32-local-accumulation *norm* *bias",
        engine("param_name_patterns_for_fp32_local_accumulation"),
        ("*norm*", "*bias"),
    ),
    "average_in_collective": Case("--ddp-average-in-collective", engine("average_in_collective"), True),
    "fp8_param_gather": Case("--fp8-param-gather", notices, "--fp8-param-gather is not supported yet"),
    "fp4_param_gather": Case("--fp4-param-gather", notices, "--fp4-param-gather is not supported yet"),
    "reuse_grad_buf_for_mxfp8_param_ag": Case(
        "--reuse-grad-buf-for-mxfp8-param-ag", notices, "--reuse-grad-buf-for-mxfp8-param-ag needs --fp8-param-gather"
    ),
    "keep_fp8_transpose_cache": Case(
        "--keep-fp8-transpose-cache", notices, "--keep-fp8-transpose-cache has no effect without --fp8-param-gather"
    ),
    "use_megatron_fsdp": Case("--use-megatron-fsdp", lambda job: job.engine, "megatron_fsdp", BUCKETS),
    "megatron_fsdp_version": Case("--megatron-fsdp-version 2", notices, "--megatron-fsdp-version 2 is not supported"),
    "use_custom_fsdp": Case(
        "--use-custom-fsdp",
        lambda job: (job.engine, resolved(job).strategy.name, *job.notices),
        (
            "megatron_fsdp",
            "optim_grads_params",
            "--use-custom-fsdp: the former name of --use-megatron-fsdp, and taken as such",
        ),
        BUCKETS,
    ),
    "data_parallel_sharding_strategy": Case(
        "--data-parallel-sharding-strategy 1", lambda job: resolved(job).strategy, ShardingStrategy.optim
    ),
    "outer_dp_sharding_strategy": Case(
        "--outer-dp-sharding-strategy optim",
        lambda job: resolved(job).outer_strategy,
        ShardingStrategy.optim,
        f"{UNITS} --num-distributed-optimizer-instances 2",
    ),
    "gradient_reduce_div_fusion": Case("--no-gradient-reduce-div-fusion", engine("gradient_reduce_div_fusion"), False),
    "suggested_communication_unit_size": Case(
        "--suggested-communication-unit-size 5000", engine("suggested_communication_unit_size"), 5000
    ),
    "nccl_ub": Case("--use-nccl-ub", lambda job: (engine("fsdp_double_buffer")(job), *job.notices), (True, _NCCL)),
    "fsdp_double_buffer": Case("--fsdp-double-buffer", engine("fsdp_double_buffer"), True),
    "fsdp_db_use_persist_buf_on_alloc_fail": Case(
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        engine("fsdp_db_use_persist_buf_on_alloc_fail"),
        True,
        f"{UNITS} --fsdp-double-buffer",
    ),
    "fsdp_all_gather_in_start_param_sync": Case(
        "--no-fsdp-all-gather-in-start-param-sync", engine("fsdp_all_gather_in_start_param_sync"), False
    ),
    "disable_symmetric_registration": Case(
        "--disable-symmetric-registration",
        notices,
        (_NCCL, f"--disable-symmetric-registration has no effect: {_UNREGISTERED}"),
        f"{UNITS} --use-nccl-ub",
    ),
    "fsdp_manual_registration": Case(
        "--fsdp-manual-registration",
        notices,
        (_NCCL, f"--fsdp-manual-registration has no effect: {_UNREGISTERED}"),
        f"{UNITS} --use-nccl-ub",
    ),
    "delay_wgrad_compute": Case(
        "--delay-wgrad-compute", lambda job: resolved(job).config.delay_wgrad_compute, True, BUCKETS
    ),
    "megatron_fsdp_main_params_dtype": Case(
        "--megatron-fsdp-main-params-dtype bf16", lambda job: resolved(job).policy.main_params_dtype, torch.bfloat16
    ),
    "megatron_fsdp_main_grads_dtype": Case(
        "--megatron-fsdp-main-grads-dtype bf16", lambda job: resolved(job).policy.main_grads_dtype, torch.bfloat16
    ),
    "megatron_fsdp_grad_comm_dtype": Case(
        "--megatron-fsdp-grad-comm-dtype bf16", lambda job: resolved(job).policy.grad_comm_dtype, torch.bfloat16
    ),
    "megatron_fsdp_use_decoupled_grad": Case(
        "--megatron-fsdp-use-decoupled-grad", notices, "--megatron-fsdp-use-decoupled-grad puts gradients where"
    ),
    "megatron_fsdp_cuda_graph_mode": Case(
        "--megatron-fsdp-cuda-graph-mode", notices, "--megatron-fsdp-cuda-graph-mode is not supported yet"
    ),
    "megatron_fsdp_enable_fine_grained_param_gather": Case(
        "--megatron-fsdp-enable-fine-grained-param-gather",
        engine("megatron_fsdp_enable_fine_grained_param_gather"),
        True,
    ),
    "megatron_fsdp_max_pool_double_buffer": Case(
        "--megatron-fsdp-max-pool-double-buffer",
        lambda job: (
            resolved(job).engine_config.megatron_fsdp_max_pool_double_buffer,
            resolved(job).engine_config.fsdp_double_buffer,
        ),
        (True, True),
    ),
}
"""By the name of the field. The engine's own tests show what each does to a step; here it is shown to arrive."""
