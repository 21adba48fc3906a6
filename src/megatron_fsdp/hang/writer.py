"""What a log says of who wrote it, and what it is called; the same words for those who write and those who read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_fsdp.engine.collective_log import SUFFIX
from megatron_fsdp.hang.processes import Process

_NAME = re.compile(r"rank-(\d{5,})(?:\.model-(\d+))?" + re.escape(SUFFIX))


@dataclass(frozen=True)
class UnitFacts:
    """A unit, for messages.

    Attributes:
        label: Its name.
        parameters: Canonical names of its parameters.
        num_bytes: Of all its parameters on one rank that holds them whole, as they are computed with.
    """

    label: str
    parameters: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Writer:
    """Who wrote a log.

    Attributes:
        rank: Global rank.
        world_size: Ranks of the job.
        peers: Global ranks that share the model's parameters, itself included.
        model: Which model of the process, from 0.
        run: Name of the run, the same on all its ranks and never used again.
        started_ns: When the log was begun, in nanoseconds since 1970.
        process: Which process it is.
        units: All units, root first.
        phases: Names of the phases by their number.
    """

    rank: int
    world_size: int
    peers: tuple[int, ...]
    model: int
    run: str
    started_ns: int
    process: Process
    units: tuple[UnitFacts, ...]
    phases: tuple[str, ...]


def as_json(writer: Writer) -> dict[str, Any]:
    """For the header of a log."""
    return asdict(writer)


def from_json(found: Mapping[str, Any]) -> Writer:
    """The writer that a header tells of.

    Raises:
        ValueError: Something is missing, or is not what it should be.
    """
    try:
        process = found["process"]
        return Writer(
            int(found["rank"]),
            int(found["world_size"]),
            tuple(int(rank) for rank in found["peers"]),
            int(found["model"]),
            str(found["run"]),
            int(found["started_ns"]),
            Process(str(process["host"]), int(process["pid"]), process["started"], str(process["namespace"])),
            tuple(
                UnitFacts(str(unit["label"]), tuple(str(name) for name in unit["parameters"]), int(unit["num_bytes"]))
                for unit in found["units"]
            ),
            tuple(str(phase) for phase in found["phases"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is incomplete ({error})") from None


def file_name(rank: int, model: int) -> str:
    """What the log of a model on a rank is called; the first model of a process needs no number."""
    return f"rank-{rank:05d}{f'.model-{model}' if model else ''}{SUFFIX}"


def rank_and_model(name: str) -> tuple[int, int] | None:
    """The rank and model that a file of this name is of; None where it is not called as logs are."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def is_log_name(name: str) -> bool:
    """Whether a file is called as logs are."""
    return rank_and_model(name) is not None
