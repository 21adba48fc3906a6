"""Train on the workers of a Ray cluster: Ray Train starts the ranks, this package's trainer runs on each.

    python examples/launch/ray_train.py --workers 16 --config run.yaml --save /shared/run --load /shared/run

`--save` and `--load` name one folder that all machines see: after a failure Ray starts all workers again, and
they go on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any


def train_on_worker(config: dict[str, Any]) -> None:
    """One rank; Ray Train has joined the process group already, so the trainer's job runs in it."""
    import torch
    import torch.distributed as dist

    from megatron_fsdp.train.options.command_line import parse_options
    from megatron_fsdp.train.options.job import World, resolve
    from megatron_fsdp.train.program import find_device_type
    from megatron_fsdp.train.ranks import Rank
    from megatron_fsdp.train.run_job import run_job

    options = parse_options(config["options"])
    name = find_device_type(options.parallel.device)
    device = torch.device("cpu") if name == "cpu" else torch.device(name, torch.accelerator.current_device_index())
    rank = Rank(dist.get_rank(), dist.get_world_size(), device, os.getppid())
    run_job(resolve(options, World(rank.count, name)), rank)


def main(argv: Sequence[str]) -> None:
    """Ask Ray for workers and run the trainer on them."""
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError:
        sys.exit("Ray Train is not installed here: pip install 'ray[train]'")
    if len(argv) < 2 or argv[0] != "--workers" or not argv[1].isdigit():
        sys.exit("usage: ray_train.py --workers N OPTIONS-OF-THE-TRAINER")
    on_cpu = "cpu" in argv[2:]
    TorchTrainer(
        train_on_worker,
        train_loop_config={"options": list(argv[2:])},
        scaling_config=ScalingConfig(num_workers=int(argv[1]), use_gpu=not on_cpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
