"""What PyTorch's flight recorder says, where this torch has one: the last collectives of a process, of any library.

Only its JSON form is read; dumps in pickle, which could run code, are left alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d

from megatron_fsdp.hang.writer import Writer

_MOST_BYTES = 1 << 26
_SHOWN = 3


def flight_name(rank: int, model: int) -> str:
    """What a dump is called."""
    return f"rank-{rank:05d}{f'.model-{model}' if model else ''}.flight.json"


def dump_flight(folder: Path, writer: Writer) -> bool:
    """Write what the recorder of this process holds beside its log; whether there was anything.

    It records where `TORCH_FR_BUFFER_SIZE` (or `TORCH_NCCL_TRACE_BUFFER_SIZE`) is above 0.
    """
    dump: Callable[[], bytes] | None = getattr(_distributed_c10d, "_dump_fr_trace_json", None) or getattr(
        _distributed_c10d, "_dump_nccl_trace_json", None
    )
    if dump is None:
        return False
    with contextlib.suppress(OSError, RuntimeError):
        text = dump()
        if not last_entries(text):
            return False
        beside = folder / f"{flight_name(writer.rank, writer.model)}.{writer.process.pid}"
        beside.write_bytes(text)
        beside.replace(folder / flight_name(writer.rank, writer.model))
        return True
    return False


def read_flight(path: Path) -> tuple[str, ...]:
    """The last collectives of a dump, one line each; nothing where there is none, or it cannot be read."""
    try:
        return last_entries(path.read_bytes()) if path.is_file() and path.stat().st_size <= _MOST_BYTES else ()
    except OSError:
        return ()


def last_entries(text: bytes) -> tuple[str, ...]:
    """The last collectives of a dump in JSON, oldest first, one line each.

    Args:
        text: As `torch._C._distributed_c10d._dump_fr_trace_json` gives it; anything else gives nothing.
    """
    try:
        found = json.loads(text)
        entries = found.get("entries", [])
        return tuple(_told(entry) for entry in entries[-_SHOWN:])
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        return ()


def _told(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group", entry.get("pg_name", "?"))
    if isinstance(group, list | tuple):
        group = " ".join(str(part) for part in group)
    return (
        f"{entry['profiling_name']} number {entry.get('collective_seq_id', '?')} of group {group}: "
        f"{entry.get('state', 'state unknown')}, {entry.get('input_sizes')} to {entry.get('output_sizes')}"
    )
