"""The presets among the examples train: their own files, with smaller models and batches, on two ranks of a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.train.loop import train
from megatron_fsdp.train.models.trained import build
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World, resolve
from tests.conftest import RunRanks
from tests.support.train_program import this_rank
from tests.train.models.runs import IDS, SMALL_SHAPE, NoCheckpoints, Silent, run_of, train_plainly

ROOT = Path(__file__).parents[3]
PRESETS = sorted(path.stem for path in (ROOT / "examples" / "presets").glob("*.yaml"))
DTYPES = (torch.bfloat16, torch.float32)
SMALL_EXPERTS: dict[str, Any] = {
    **SMALL_SHAPE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FLAGS = "--seq-length 8 --global-batch-size 8 --train-iters 3 --eval-iters 1 --lr-warmup-iters 1 --log-interval 2"


def words_of(name: str, folder: Path) -> list[str]:
    """The command line of a preset in small, with its model's configuration written into a folder."""
    file = f"examples/presets/{name}.yaml"
    full = parse_options(["--config", str(ROOT / file)])
    assert full.model.hf_config is not None
    model = json.loads((ROOT / full.model.hf_config).read_text(encoding="utf-8"))
    model |= SMALL_EXPERTS if model["model_type"] == "deepseek_v3" else SMALL_SHAPE
    (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
    words = ["--config", str(ROOT / file), "--hf-config", str(folder), *FLAGS.split()]
    if full.parallel.expert_model_parallel_size > 1:
        words += ["--expert-model-parallel-size", "2"]
    instances = full.ddp.num_distributed_optimizer_instances
    return [*words, "--num-distributed-optimizer-instances", "2"] if instances > 1 else words


def job_in_small(words: list[str], ranks: int) -> Job:
    return resolve(parse_options(words), World(ranks, "cpu"))


def train_in_small(words: list[str]) -> tuple[list[float], list[float], dict[str, str]]:
    """Losses, norms of gradients, and the dtypes that the engine was given."""
    rank = this_rank()
    job = job_in_small(words, rank.count)
    trained = build(job, IDS, rank)
    watcher = Silent()
    train(run_of(job, trained, rank), watcher, NoCheckpoints())
    ddp = job.ddp
    dtypes = {
        "computes": job.dtype,
        "main weights": ddp.megatron_fsdp_main_params_dtype,
        "main gradients": ddp.megatron_fsdp_main_grads_dtype,
        "travels": ddp.megatron_fsdp_grad_comm_dtype,
    }
    shown = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    return [r.loss for r in watcher.records], [r.grad_norm for r in watcher.records], shown


def _bfloat16_draws_round_float32_draws() -> bool:
    drawn = [torch.empty(64, dtype=dtype).normal_(generator=torch.Generator().manual_seed(0)) for dtype in DTYPES]
    return torch.equal(drawn[0], drawn[1].to(drawn[0].dtype))


@pytest.mark.skipif(not _bfloat16_draws_round_float32_draws(), reason="torch 2.11 draws other values in bfloat16")
@pytest.mark.full(short=["llama3-8b-8gpu"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_trains_as_one_process_does(run_ranks: RunRanks, name: str, tmp_path: Path) -> None:
    words = words_of(name, tmp_path)
    options = parse_options(words)
    ranks = 4 if options.ddp.num_distributed_optimizer_instances > 1 else 2
    job = job_in_small(words, ranks)
    assert (job.batch.total, job.batch.filled) == (8, 0)
    plain = train_plainly(
        {
            "hf_config": tmp_path,
            "seq_length": 8,
            "micro_batch_size": 8,
            "global_batch_size": 8,
            "train_iters": 3,
            "eval_iters": 1,
            "calculate_per_token_loss": True,
            "lr": job.schedule.peak,
            "min_lr": job.schedule.final,
            "lr_decay_style": "cosine",
            "lr_warmup_iters": 1,
            "weight_decay": 0.1,
            "adam_beta2": 0.95,
            "clip_grad": 1.0,
        }
    )
    for losses, norms, dtypes in run_ranks(ranks, train_in_small, words):
        torch.testing.assert_close(losses, plain.losses, rtol=3e-3, atol=0)  # float32 beside bfloat16
        torch.testing.assert_close(norms, plain.norms, rtol=3e-2, atol=0)
        assert dtypes == {
            "computes": "bfloat16",
            "main weights": "float32",
            "main gradients": "float32",
            "travels": "bfloat16",
        }
