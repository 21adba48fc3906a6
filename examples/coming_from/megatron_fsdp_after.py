"""Coming from the published Megatron-FSDP: the script after.

torchrun --standalone --nproc-per-node 2 examples/coming_from/megatron_fsdp_after.py runs/from_published 20
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from workload import Block, LanguageModel, batch, start, tell

from megatron_fsdp import fully_shard
from megatron_fsdp.checkpoint import Checkpointer

MICROBATCHES, DECAY_STEPS = 2, 100


def main(folder: Path, steps: int) -> None:
    """Train up to a number of steps, from the latest checkpoint if there is one."""
    device = start()
    torch.manual_seed(0)
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fully_shard(model, optimizer, fsdp_unit_modules=[Block])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DECAY_STEPS)
    done = 0
    checkpoints = Checkpointer(folder)
    if checkpoints.latest() is not None:
        done = checkpoints.load(model, optimizer, extra={"schedule": schedule}).iteration

    for step in range(done, steps):
        losses = []
        for microbatch in range(MICROBATCHES):
            loss = model(*batch(step * MICROBATCHES + microbatch, device))
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tell(f"step {step + 1}: loss", torch.stack(losses).mean())
        tell(f"step {step + 1}: gradient norm", norm)

    model.eval()
    with torch.no_grad():
        tell("held-out loss", model(*batch(-1, device)))
    if steps > done:
        checkpoints.save(steps, model, optimizer, extra={"schedule": schedule})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
