"""What a run was told and what became of it, for the header."""

from __future__ import annotations

from pathlib import Path

from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import flag_for


def applied_rows(job: Job, rank: Rank, data: TokenData, folder: Path) -> list[tuple[str, str]]:
    """Return what the header says, line by line."""
    options, batch = job.options, job.batch
    by_origin: dict[str, list[str]] = {}
    for name, origin in options.origins.items():
        by_origin.setdefault(origin, []).append(flag_for(name))
    return [
        ("ranks", f"{rank.count} on {rank.device.type}"),
        ("engine", f"{job.engine}, {job.ddp.data_parallel_sharding_strategy}"),
        ("dtype", str(job.dtype).removeprefix("torch.")),
        ("text", str(options.data.data_path or "source of the Python standard library")),
        ("tokens", f"{len(data.training):,} to train on, {len(data.held_out):,} held out"),
        ("step", f"{batch.total} samples of {job.seq_length} tokens, {batch.microbatches} microbatches a rank"),
        ("steps", f"{job.train_iters:,}"),
        ("results", str(folder)),
        *((f"from {origin}", " ".join(flags)) for origin, flags in by_origin.items()),
        *(("notice", notice) for notice in (*job.notices, *data.notes)),
    ]
