"""For every option: words, and what they change in the job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_fsdp.train.options.job import World
from tests.train.options.cases import (
    EXPERTS,
    FLOAT32,
    FSDP2,
    LLAMA,
    RANKS,
    RUN,
    SHAPE,
    TRANSFORMERS,
    UNITS,
    Case,
    notices,
    of,
    plain,
    rate,
    resolved,
)

_MODEL = plain(
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
    **plain(
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
    **plain(
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
    **plain(
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
    **plain("optimizer", f"{UNITS} --optimizer sgd", "", {"sgd_momentum": ("--sgd-momentum 0.5", 0.5)}),
}

_DATA = plain(
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
    **plain("data", f"{UNITS} --data-path text", "tests/train/data", {"json_key": ("--json-key body", "body")}),
    **plain(
        "data", f"{UNITS} --data-path text", "tests/train/data", {"data_cache_path": ("--data-cache-path c", Path("c"))}
    ),
    **plain(
        "data",
        f"{UNITS} --tokenizer-type HuggingFaceTokenizer --tokenizer-model s.json",
        "tests/train/data",
        {"tokenizer_model": ("--tokenizer-model t.json", Path("t.json"))},
    ),
    **plain("data", f"{UNITS} --tokenizer-type bpe", "tests/train/data", {"vocab_size": ("--vocab-size 300", 300)}),
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
    **plain(
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
    **plain(
        "checkpoint",
        f"{UNITS} --load c",
        "tests/train/recovery",
        {
            "finetune": ("--finetune", True),
            "no_load_optim": ("--no-load-optim", True),
            "no_load_rng": ("--no-load-rng", True),
            "strict_fsdp_dtensor_load": ("--no-strict-fsdp-dtensor-load", False),
            "verify_integrity": ("--no-verify-integrity", False),
        },
    ),
    **plain(
        "checkpoint",
        UNITS,
        "tests/train/recovery",
        {"dump_param_to_param_group_map": ("--dump-param-to-param-group-map m", Path("m"))},
    ),
}

_REPORTING = plain(
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
) | plain(
    "reporting", f"{UNITS} --wandb-project w", "tests/train/reporting", {"wandb_exp_name": ("--wandb-exp-name e", "e")}
)

_RECOVERY = plain(
    "recovery",
    UNITS,
    "tests/train/recovery",
    {
        "max_nan_steps": ("--max-nan-steps 0", 0),
        "hang_timeout_minutes": ("--hang-timeout-minutes 1", 1.0),
    },
) | plain(
    "recovery",
    f"{UNITS} --save c",
    "tests/train/recovery",
    {
        "max_failed_saves": ("--max-failed-saves 1", 1),
        "max_restarts": ("--max-restarts 2", 2),
    },
)

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
