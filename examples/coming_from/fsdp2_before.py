"""Coming from FSDP2: the script before.

torchrun --standalone --nproc-per-node 2 examples/coming_from/fsdp2_before.py runs/fsdp2 20
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from workload import LanguageModel, batch, start, tell

MICROBATCHES, DECAY_STEPS = 2, 100


def main(folder: Path, steps: int) -> None:
    """Train up to a number of steps, from the checkpoint if it is there."""
    device = start()
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = LanguageModel().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DECAY_STEPS)
    done = 0
    if (folder / ".metadata").exists():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "iteration": 0}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        done = state["iteration"]

    for step in range(done, steps):
        losses = []
        for microbatch in range(MICROBATCHES):
            model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
            loss = model(*batch(step * MICROBATCHES + microbatch, device))
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tell(f"step {step + 1}: loss", torch.stack(losses).mean())
        tell(f"step {step + 1}: gradient norm", norm)

    model.eval()
    with torch.no_grad():
        tell("held-out loss", model(*batch(-1, device)))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "iteration": steps}
    dcp.save(state, checkpoint_id=folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
