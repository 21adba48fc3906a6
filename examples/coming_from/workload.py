"""The model, the text and the ranks of these scripts: what stays when the way to shard changes."""

import argparse
import inspect
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

WIDTH, HEADS, BLOCKS, SEQUENCE, ROWS = 48, 4, 3, 32, 8


class Block(nn.Module):
    """A causal transformer layer."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixing, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [rows, tokens, width] with attention and MLP added."""
        heads = self.mixing(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of `ids` and the bytes after them, `labels` (both [rows, tokens])."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def start() -> torch.device:
    """Join torchrun's ranks; returns the device of this one: an accelerator where there are some, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu" if accelerator is None else f"{accelerator.type}:{os.environ['LOCAL_RANK']}")
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def batch(number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a batch of all ranks, and the bytes that follow; -1 is held out from the others."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    split = len(text) - 8_000
    part = text[split:] if number < 0 else text[:split]
    starts = torch.randint(len(part) - SEQUENCE, (ROWS,), generator=torch.Generator().manual_seed(number + 1))
    rows = torch.stack([part[first : first + SEQUENCE + 1] for first in starts]).to(device)
    own = rows.chunk(dist.get_world_size())[dist.get_rank()]
    return own[:, :-1], own[:, 1:]


def tell(what: str, value: torch.Tensor) -> None:
    """Print the mean over ranks of a number, once."""
    mean = value.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"{what} {mean.item() / dist.get_world_size():.6f}", flush=True)
