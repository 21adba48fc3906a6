"""The shortest whole program: a plain training loop, sharded over all ranks.

    torchrun --standalone --nproc-per-node 2 examples/quickstart.py

Runs on CPUs and on GPUs alike. Only the call of `fully_shard` knows that there is more than one rank.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import fully_shard

WIDTH, BLOCKS, STEPS, SAMPLES = 64, 4, 200, 128


class Block(nn.Module):
    """A residual layer: the unit that is gathered when it is needed and released afterwards."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [samples, width] with the layer's output added."""
        return x + self.layers(x)


def main() -> None:
    """Train as one of torchrun's ranks."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu" if accelerator is None else f"{accelerator.type}:{os.environ['LOCAL_RANK']}")
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))

    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sharded, optimizer = fully_shard(
        model, optimizer, device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[Block], zero_dp_strategy=3
    )

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    for step in range(STEPS):
        x = torch.randn(SAMPLES, 8, device=device)
        target = x.sin().sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(sharded(x), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 40 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
