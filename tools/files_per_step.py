"""Count the files of the package that wrapping a model, connecting an optimizer, and a training step run through.

    python tools/files_per_step.py            # two gloo ranks, three blocks, strategy 3; prints the table of rank 0
    python tools/files_per_step.py --list     # and the files, with the functions of each that ran

What a reader has to open to follow each of them, counted by `sys.setprofile`, the training step in a steady state.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

PACKAGE = str(Path(__file__).resolve().parents[1] / "src" / "megatron_fsdp") + "/"
WIDTH, BLOCKS, RANKS = 32, 3, 2


class Block(nn.Module):
    """Two linears and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run the residual block."""
        hidden: Tensor = self.down(torch.relu(self.up(x)))
        return x + hidden


def calls_in(function: Callable[[], object]) -> Counter[tuple[str, str]]:
    """Count calls of functions of the package, by (file, name)."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def measure(rank: int, store: str, lists_files: bool) -> None:
    """Trace one rank; rank 0 prints."""
    from megatron_fsdp import experimental, fully_shard_model, fully_shard_optimizer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))
    model: nn.Module = module
    x = torch.randn(4, WIDTH)

    def wrap() -> None:
        nonlocal model
        model = fully_shard_model(module, fsdp_unit_modules=[Block])

    first = fully_shard_model(Block())  # what wrapping imports is there from here on
    fully_shard_optimizer(torch.optim.AdamW(first.parameters()))
    found = {"wrap": calls_in(wrap)}
    optimizer = torch.optim.AdamW(model.parameters())
    found["connect optimizer"] = calls_in(lambda: fully_shard_optimizer(optimizer))
    for _ in range(3):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found["forward + backward"] = calls_in(lambda: model(x).mean().backward())
    found["optimizer.step"] = calls_in(optimizer.step)

    def wrap_in_place() -> None:
        with experimental.fully_shard_context("cpu"):
            shards = (Shard(0),)
            placements = experimental.Placements((0,), shards, shards, shards)
            for block in (*(child for child in other if isinstance(child, Block)), other):
                experimental.fully_shard(block, mesh, placements)

    mesh = init_device_mesh("cpu", (RANKS,))
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))
    found["wrap in place"] = calls_in(wrap_in_place)
    if rank == 0:
        for what, calls in found.items():
            files = sorted({file for file, _ in calls})
            print(f"{what:20} {len(files):3} files {len(calls):4} functions {calls.total():6} calls")
            for file in files if lists_files else ():
                names = dict.fromkeys(name.partition(".<locals>")[0] for of, name in calls if of == file)
                print(f"    {file}: {', '.join(names)}")
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the files and functions")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/store", given.list), RANKS)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
