"""Train as torchtitan does, on this engine: torchrun --nproc-per-node 2 examples/fsdp2_torchtitan.py [torch].

With the word `torch` the same program runs on PyTorch's own FSDP2.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

if "torch" in sys.argv[1:]:
    from torch.distributed.fsdp import fully_shard
else:
    from megatron_fsdp.fsdp2 import fully_shard  # type: ignore[no-redef]


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
with torch.device("meta"):
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    norm, head = nn.LayerNorm(32), nn.Linear(32, 100)
    model = nn.Sequential(nn.Embedding(100, 32), *blocks, norm, head)
for block in blocks:
    fully_shard(block, mesh=mesh)
fully_shard([norm, head], mesh=mesh, reshard_after_forward=False)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
torch.manual_seed(0)
for param in model.parameters():
    nn.init.normal_(param, std=0.1)  # each rank its shard
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(100, (8, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
for step in range(5):
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"{step}: loss {loss.item():.5f}")
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder[0])
dist.destroy_process_group()
