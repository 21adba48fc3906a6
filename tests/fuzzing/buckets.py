"""Random models wrapped by `DistributedDataParallel`: parameters in buckets in place of units."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, fully_shard_optimizer
from tests.fuzzing.case import Case, draw_case
from tests.fuzzing.model import build
from tests.fuzzing.run import Ranks, Trace, make_optimizer, parallelize, play_sharded

_CARRIED_OVER = ("calculate_per_token_loss", "find_unused_parameters", "verify_ranks")


def draw_bucket_case(seed: int, max_ranks: int = 4) -> Case:
    """Draw a case; its options are those of the wrapper and, under `config`, fields of the configuration."""
    case = draw_case(seed, max_ranks)
    rng = random.Random(seed + 1_000_003)
    shards = rng.random() < 0.6
    policy = case.precision.policy
    config: dict[str, object] = {
        "use_distributed_optimizer": shards,
        "overlap_grad_reduce": rng.random() < 0.7,
        "average_in_collective": case.options.get("average_in_collective", False),
        "check_for_nan_in_grad": case.options.get("report_nan_in_param_grad", False),
        "bucket_size": rng.choice([None, 1, 20, 60, 200, 1000]),
        "gradient_reduce_div_fusion": rng.random() < 0.7 or case.options.get("average_in_collective", False),
        "pad_buckets_for_high_nccl_busbw": rng.random() < 0.15,
        "megatron_fsdp_main_params_dtype": policy.main_params_dtype,
        "megatron_fsdp_main_grads_dtype": policy.main_grads_dtype,
        "megatron_fsdp_grad_comm_dtype": policy.grad_comm_dtype,
    }
    if any(block.sometimes and block.calls > 1 and block.checkpoint == "reentrant" for block in case.blocks):
        # Gradients of such a layer come once or twice, as data decide, which overlap refuses (docs/ddp.md).
        config["overlap_grad_reduce"] = False
    if shards and case.mesh.outer:
        config["num_distributed_optimizer_instances"] = case.mesh.outer
    if shards and rng.random() < 0.7:
        config["overlap_param_gather"] = True
        config["align_param_gather"] = rng.random() < 0.4
    if case.precision.compute is torch.float32 and rng.random() < 0.2:
        config["param_name_patterns_for_fp32_local_accumulation"] = rng.choice([("all",), ("*.core.*", "*weight")])
    delayable = not case.mesh.tensor and any(block.kind == "mlp" for block in case.blocks)
    config["delay_wgrad_compute"] = delayable and rng.random() < 0.3
    carried = {name: case.options[name] for name in _CARRIED_OVER if name in case.options}
    return replace(case, wrap="buckets", strategy=int(shards), outer_strategy=0, options={**carried, "config": config})


class BucketRanks(Ranks):
    """This rank of a model in buckets."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = build(case)
        sizes = {"dp": case.mesh.data_parallel, "tensor": case.mesh.tensor}
        names = tuple(name for name, ranks in sizes.items() if ranks)
        mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)
        if case.mesh.tensor:
            parallelize(self.model, mesh)
        options = dict(case.options)
        self.sharded = DistributedDataParallel(
            DistributedDataParallelConfig(**options.pop("config")),
            self.model,
            mesh,
            dp_dim="dp",
            tp_dim="tensor" if case.mesh.tensor else None,
            sync_model_each_microbatch=case.mode in ("plain", "no_sync"),
            **options,
        )
        self.model = self.sharded
        self.optimizer = fully_shard_optimizer(make_optimizer(case, self.sharded))
        self.position = mesh.get_local_rank("dp")


def play_buckets_on_rank(case: Case) -> Trace:
    """For a worker: as `play_on_rank`."""
    return play_sharded(BucketRanks(case))
