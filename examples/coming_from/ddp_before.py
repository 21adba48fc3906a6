"""Coming from DDP: the script before.

torchrun --standalone --nproc-per-node 2 examples/coming_from/ddp_before.py ddp.pt 20
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import LanguageModel, batch, start, tell

MICROBATCHES, DECAY_STEPS = 2, 100


def main(path: Path, steps: int) -> None:
    """Train up to a number of steps, from the file if it is there."""
    device = start()
    torch.manual_seed(0)
    module = LanguageModel().to(device)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DECAY_STEPS)
    done = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        done = state["iteration"]

    for step in range(done, steps):
        losses = []
        for microbatch in range(MICROBATCHES):
            is_last = microbatch == MICROBATCHES - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(*batch(step * MICROBATCHES + microbatch, device))
                (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tell(f"step {step + 1}: loss", torch.stack(losses).mean())
        tell(f"step {step + 1}: gradient norm", norm)

    model.eval()
    with torch.no_grad():
        tell("held-out loss", model(*batch(-1, device)))
    if dist.get_rank() == 0:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "schedule": schedule.state_dict(), "iteration": steps}, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
