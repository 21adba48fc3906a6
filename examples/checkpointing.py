"""A run that can be ended at any time and started again: same losses, on the same number of ranks bit for bit.

torchrun --standalone --nproc-per-node 2 examples/checkpointing.py runs/example 30
torchrun --standalone --nproc-per-node 2 examples/checkpointing.py runs/example 60     # goes on after step 30
torchrun --standalone --nproc-per-node 3 examples/checkpointing.py runs/example 90     # on other ranks, too
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard
from megatron_fsdp.checkpoint import Checkpointer

WIDTH, SAMPLES, SAVE_EVERY = 64, 32, 10


class Block(nn.Module):
    """A residual layer with dropout, whose random numbers a resumed run has to repeat."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [samples, width] with the layer's output added."""
        return x + self.layers(x)


def main(folder: str, steps: int) -> None:
    """Train up to a number of steps, from the latest checkpoint in a folder if there is one."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(8, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sharded, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block], zero_dp_strategy=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    torch.manual_seed(1 + dist.get_rank())  # other data and other dropout on every rank

    done = 0
    with Checkpointer(folder, keep_last=2, in_background=True) as checkpoints:
        if checkpoints.latest() is not None:
            report = checkpoints.load(sharded, optimizer, extra={"schedule": schedule})
            done = report.iteration or 0
            if dist.get_rank() == 0:
                print(f"goes on after step {done}: {report}")
        for step in range(done + 1, steps + 1):
            x = torch.randn(SAMPLES, 8)
            loss = nn.functional.mse_loss(sharded(x), x.sin().sum(dim=1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % SAVE_EVERY == 0 or step == steps:
                checkpoints.save(step, sharded, optimizer, extra={"schedule": schedule})
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {loss.item():.6f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
