"""Data parallelism by buckets, with a distributed optimizer and several microbatches per step.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py

Runs on CPUs and on GPUs alike.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from megatron_fsdp.ddp import DistributedOptimizer

WIDTH, STEPS, MICROBATCHES, SAMPLES = 64, 200, 2, 64


def main() -> None:
    """Train as one of torchrun's ranks."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu" if accelerator is None else f"{accelerator.type}:{os.environ['LOCAL_RANK']}")
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))

    torch.manual_seed(0)  # the same weights on every rank
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    module = nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1)).to(device)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=4_096
    )
    model = DistributedDataParallel(config, module)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), model, clip_grad=1.0)

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            x = torch.randn(SAMPLES, 8, device=device)
            target = x.sin().sum(dim=1, keepdim=True)
            is_last = microbatch == MICROBATCHES - 1
            with model.sync() if is_last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), target)
                (loss / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 40 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
