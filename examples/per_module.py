"""Shard a model module by module, in place, and train it: torchrun --nproc-per-node 2 examples/per_module.py."""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from megatron_fsdp.experimental import (
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)

MICROBATCHES = 2


def main() -> None:
    """Train three steps, save, and load."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    zero3 = Placements(["dp"], parameter=[Shard(0)], gradient=[Shard(0)], optimizer=[Shard(0)])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    model.append(nn.Linear(32, 100))

    with fully_shard_context("cpu") as context:
        for module in (*model, model):  # inner modules first
            fully_shard(module, mesh, zero3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fully_shard_optimizer(optimizer)

    tokens = torch.randint(100, (MICROBATCHES, 8, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(3):
        for number, batch in enumerate(tokens):
            with microbatch(context, is_last=number == MICROBATCHES - 1):
                loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
                (loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    save_checkpoint(model, optimizer, str(folder[0]))
    load_checkpoint(model, optimizer, str(folder[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
