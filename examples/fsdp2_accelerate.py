"""Train by accelerate's FSDP2 plugin, on this engine: torchrun --nproc-per-node 2 examples/fsdp2_accelerate.py [torch].

`install()` is the line that is added; with the word `torch` it is left out, and PyTorch's own FSDP2 shards.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from on_cpus import ON_CPU, shard_on_cpus
from torch import nn

import megatron_fsdp.fsdp2

if "torch" not in sys.argv[1:]:
    megatron_fsdp.fsdp2.install()

shard_on_cpus()


class Block(nn.Sequential):
    """A unit that is gathered at once."""


dist.init_process_group("gloo" if ON_CPU else "nccl")
torch.manual_seed(0)
model: nn.Module = nn.Sequential(*(Block(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)))
rows = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)
accelerator = Accelerator(cpu=ON_CPU, fsdp_plugin=plugin, gradient_accumulation_steps=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x, y) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"{step}: loss {accelerator.gather_for_metrics(loss.detach()).mean().item():.5f}")
folder = [tempfile.mkdtemp() if accelerator.is_main_process else None]
dist.broadcast_object_list(folder)
accelerator.save_state(folder[0])
accelerator.save_model(model, folder[0])
dist.destroy_process_group()
