"""What a run was told and what became of it: for the header, for `applied.json`, and for trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import torch

from megatron_fsdp.config.ddp_config_flags import off_flag_of
from megatron_fsdp.config.precision import MixedPrecisionPolicy, resolve_precision
from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.launch.ranks import Rank
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import DDP_FIELDS, OPTIONS, SECTIONS, Options, flag_for
from megatron_fsdp.train.reporting.peak import Peak
from megatron_fsdp.train.reporting.speed import Speed

APPLIED_FILE = "applied.json"
_PRESET = "preset"


def applied_rows(
    job: Job, rank: Rank, data: TokenData, folder: Path, speed: Speed, peak: Peak
) -> list[tuple[str, str]]:
    """Return what the header says, line by line.

    Args:
        job: The run.
        rank: This process.
        data: The tokens.
        folder: Of results.
        speed: What a step costs.
        peak: What a rank could do.
    """
    flops = "" if math.isnan(speed.flops) else f" and {speed.flops / 1e12:.3g} TFLOP"
    known = "" if math.isnan(peak.tflops) else f"{peak.tflops:.3g} TFLOP/s per rank, "
    return [
        ("engine", engine_words(job)),
        ("ranks", f"{rank.count} on {rank.device.type}{sizes_words(job)}"),
        ("batch", batch_words(job)),
        ("dtypes", dtype_words(job)),
        ("text", str(job.options.data.data_path or "source of the Python standard library")),
        ("tokens", f"{len(data.training):,} to train on, {len(data.held_out):,} held out"),
        ("steps", f"{job.train_iters:,} of {job.tokens_per_step:,} tokens{flops}"),
        ("peak", f"{known}{peak.source}"),
        ("results", str(folder)),
        *(
            ("as applied", f"{words} ({origin})")
            for origin, words in said(job.options).items()
            if not _is_preset(origin)
        ),
        *(("notice", notice) for notice in (*job.notices, *data.notes)),
    ]


def preset_rows(options: Options) -> list[tuple[str, str]]:
    """Return what a preset says and nobody else, in one line."""
    return [(origin, words) for origin, words in said(options).items() if _is_preset(origin)]


def said(options: Options) -> dict[str, str]:
    """Return, for everyone who said something, the options that hold as they said, with their values."""
    by_origin: dict[str, list[str]] = {}
    for name, origin in options.origins.items():
        by_origin.setdefault(origin, []).append(spelled(options, name))
    return {origin: " ".join(words) for origin, words in by_origin.items()}


def spelled(options: Options, name: str) -> str:
    """Return an option as one would type it."""
    flag, value = flag_for(name), value_of(options, name)
    if value is True:
        return flag
    if value is False:
        return (OPTIONS[name].off_flags or (f"{flag} off",))[0] if name in OPTIONS else off_flag_of(DDP_FIELDS[name])
    words = [_word(part) for part in value] if isinstance(value, tuple) else [_word(value)]
    return " ".join([flag, *(f"'{word}'" if not word or word != "".join(word.split()) else word for word in words)])


def value_of(options: Options, name: str) -> Any:
    """Return the value of an option; in an address, a password is left out."""
    if name in DDP_FIELDS:
        return getattr(options.ddp, DDP_FIELDS[name])
    section = next(section for section in SECTIONS if hasattr(getattr(options, section), name))
    value = getattr(getattr(options, section), name)
    return without_password(value) if name == "mlflow_tracking_uri" and value is not None else value


def without_password(address: str) -> str:
    """Return an address without the user and the password that may stand in it."""
    parts = urlsplit(address)
    if "@" not in parts.netloc:
        return address
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def applied(job: Job) -> dict[str, Any]:
    """Return the whole run as plain values: every option with its value, who said it, and what was made of it."""
    names = [*OPTIONS, *DDP_FIELDS]
    return {
        "version": __version__,
        "torch": torch.__version__,
        "options": {name: _plain(value_of(job.options, name)) for name in names},
        "origins": dict(job.options.origins),
        "engine": job.engine,
        "ddp": job.ddp.to_dict(),
        "sizes": asdict(job.sizes),
        "batch": {**asdict(job.batch), "microbatches": job.batch.microbatches, "filled": job.batch.filled},
        "dtype": _word(job.dtype),
        "schedule": asdict(job.schedule),
        "train_iters": job.train_iters,
        "seq_length": job.seq_length,
        "notices": list(job.notices),
    }


def tracker_config(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what trackers are told of a run: all that `applied` says, in one level."""
    flat = {name: value for name, value in found.items() if not isinstance(value, Mapping)}
    flat.update(found["options"])
    flat.update({f"{part}.{name}": value for part in ("sizes", "batch", "ddp") for name, value in found[part].items()})
    return flat


def engine_words(job: Job) -> str:
    """Return what shards the model, and how."""
    if job.engine == "torch_fsdp2":
        return "torch FSDP2"
    if job.engine == "ddp":
        return "ddp, buckets" + (", distributed optimizer" if job.ddp.use_distributed_optimizer else "")
    outer = job.ddp.outer_dp_sharding_strategy
    across = "" if outer == "no_shard" else f", {outer} across"
    return f"{job.engine}, {job.ddp.data_parallel_sharding_strategy}{across}"


def sizes_words(job: Job) -> str:
    """Return how ranks are shared out, where there is more than data parallelism."""
    if job.sizes.is_data_only:
        return ""
    sizes = asdict(job.sizes)
    return ": " + " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "data")


def batch_words(job: Job) -> str:
    """Return the arithmetic of the batch, such as `global 8 = 2 ranks x 1 microbatches x 4`."""
    batch = job.batch
    cut = f"{_counted(batch.ranks, 'rank')} x {_counted(batch.microbatches, 'microbatch')} x {batch.micro}"
    filled = f" - {batch.filled} that only fill up" if batch.filled else ""
    return f"global {batch.total} = {cut}{filled}"


def dtype_words(job: Job) -> str:
    """Return the dtypes of everything that has one."""
    if job.engine == "torch_fsdp2":
        return f"compute {_word(job.dtype)}"
    config = job.ddp
    main_grads, comm = config.megatron_fsdp_main_grads_dtype, config.megatron_fsdp_grad_comm_dtype
    if config.grad_reduce_in_fp32:
        main_grads = comm = torch.float32
    policy = MixedPrecisionPolicy(config.megatron_fsdp_main_params_dtype, main_grads, comm)
    found = resolve_precision(policy, job.dtype)
    return (
        f"compute {_word(found.compute)}, main weights {_word(found.main_params)}, main gradients "
        f"{_word(found.main_grads)}, gradient communication {_word(found.grad_comm)}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def _is_preset(origin: str) -> bool:
    return origin.partition(" ")[0] == _PRESET


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, bool | int | float | str) or value is None else _word(value)
