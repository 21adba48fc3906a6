"""Coming from the published Megatron-FSDP: the script before.

torchrun --standalone --nproc-per-node 2 examples/coming_from/megatron_fsdp_before.py runs/published 20
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from workload import Block, LanguageModel, batch, start, tell

from megatron_fsdp import MixedPrecisionPolicy, fully_shard

MICROBATCHES, DECAY_STEPS = 2, 100


def main(folder: Path, steps: int) -> None:
    """Train up to a number of steps, from the checkpoint if it is there."""
    device = start()
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
    mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fully_shard(
        model,
        optimizer,
        device_mesh=mesh,
        dp_shard_dim="dp_shard_cp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=3,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32),
        sync_model_each_microbatch=False,
        preproc_state_dict_for_dcp_ckpt=True,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DECAY_STEPS)
    done = 0
    if (folder / ".metadata").exists():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "iteration": 0}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        done = state["iteration"]

    for step in range(done, steps):
        losses = []
        for microbatch in range(MICROBATCHES):
            model.set_model_auto_sync(microbatch == MICROBATCHES - 1)
            loss = model(*batch(step * MICROBATCHES + microbatch, device))
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tell(f"step {step + 1}: loss", torch.stack(losses).mean())
        tell(f"step {step + 1}: gradient norm", norm)

    model.eval()
    with torch.no_grad():
        tell("held-out loss", model(*batch(-1, device)))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state | {"schedule": schedule.state_dict(), "iteration": steps}, checkpoint_id=folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
