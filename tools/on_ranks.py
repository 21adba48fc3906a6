"""Call a function on ranks of this machine, in new processes over gloo."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function on every rank; return the first rank's result, a value for JSON."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _call, (count, folder, function, arguments), nprocs=count
        )
        return json.loads(Path(folder, "returned.json").read_text("utf-8"))


def _call(rank: int, count: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-point", rank=rank, world_size=count)
    returned = function(*arguments)
    if rank == 0:
        Path(folder, "returned.json").write_text(json.dumps(returned), encoding="utf-8")
    dist.barrier()  # nobody leaves while a peer still needs the connection
    dist.destroy_process_group()
