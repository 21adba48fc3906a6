"""What a rank of a pipeline has of a model, so that a checkpoint of all stages is that of the whole model.

Parameters have the names of the whole model in every stage. So what differs from a model on one rank is only what the
stages have to tell each other: which names are in other stages, which parameter groups the others have, and that the
head is a copy where it is tied to input embeddings in another stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.ranks import gather_objects
from megatron_fsdp.checkpoint.report import LoadReport

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class PipelinePlace:
    """Where a rank lies in a pipeline; its model says it as `pipeline_place`.

    Attributes:
        index: Of the rank in the pipeline.
        size: Ranks of the pipeline.
        number: Of the pipeline among all of them: the same on its ranks, another one in every other.
        names: Of all parameters and buffers of all ranks of the pipeline.
        copies: Name here of a parameter that repeats one of another rank -> name of that one. Both are equal at all
            times, so the state of the optimizer is saved once, under the second name, and loaded into both.
    """

    index: int
    size: int
    number: int
    names: frozenset[str]
    copies: Mapping[str, str] = field(default_factory=dict)


def place_of(model: nn.Module) -> PipelinePlace | None:
    """Where this rank lies in a pipeline; None where the model is whole."""
    for part in (model, getattr(model, "module", None)):
        found = getattr(part, "pipeline_place", None)
        if isinstance(found, PipelinePlace) and found.size > 1:
            return found
    return None


def original_name(model: nn.Module, name: str) -> str:
    """The name of the parameter that a bare name repeats; the name itself where it repeats none."""
    place = place_of(model)
    return name if place is None else place.copies.get(name, name)


def is_repeated(model: nn.Module, name: str) -> bool:
    """Whether what has a bare name here repeats a parameter of another rank."""
    return original_name(model, name) != name


def stored_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """The names under which a checkpoint may have what has a bare name here, the best one first."""
    place = place_of(model)
    if place is None:
        return (name,)
    original = place.copies.get(name, name)
    copies = [copy for copy, source in place.copies.items() if source == original]
    return tuple(dict.fromkeys((original, name, *copies)))


def names_of_all(model: nn.Module) -> frozenset[str]:
    """Names of what all ranks of the pipeline have, this one included; empty where the model is whole."""
    place = place_of(model)
    return frozenset() if place is None else place.names


def groups_of_all(own: Groups, place: PipelinePlace, group: dist.ProcessGroup | None = None) -> Groups:
    """The parameter groups of all stages as one optimizer of the whole model would have them; collective.

    Args:
        own: Of this rank, as a checkpoint has them.
        place: Of this rank.
        group: The ranks that save.
    """
    by_index: dict[int, Groups] = {}
    for index, groups in gather_objects((place.index, own), group):
        by_index.setdefault(index, groups)
    return join_groups([by_index[index] for index in sorted(by_index)])


def join_groups(stages: Sequence[Groups]) -> Groups:
    """Put groups together: by position where all stages have groups of the same options, else by their options. Pure.

    Args:
        stages: Groups of each stage, in order: options, and the names of parameters under "params".
    """
    first = [_options(group) for group in stages[0]]
    if all(_alike([_options(group) for group in groups], first) for groups in stages):
        rows: list[Groups] = [list(row) for row in zip(*stages, strict=True)]
    else:
        rows = []
        for group in (group for groups in stages for group in groups):
            row = next((row for row in rows if _alike(_options(row[0]), _options(group))), None)
            if row is None:
                rows.append([group])
            else:
                row.append(group)
    return [{**row[0], "params": [name for group in row for name in group["params"]]} for row in rows]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _alike(a: Any, b: Any) -> bool:
    """Equality that looks into lists and dicts, and compares tensors as a whole."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(value, b[name]) for name, value in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_alike(one, other) for one, other in zip(a, b, strict=True))
    return bool(a == b)


def report_of_all(own: LoadReport, group: dist.ProcessGroup | None = None) -> LoadReport:
    """What loading did in all stages; collective.

    Args:
        own: Of this rank.
        group: The ranks that load.
    """
    everyone: list[LoadReport] = gather_objects(own, group)
    return replace(
        own,
        loaded=_union([report.loaded for report in everyone]),
        missing=_union([report.missing for report in everyone]),
        unexpected=_union([report.unexpected for report in everyone]),
        reshaped=dict(sorted(item for report in everyone for item in report.reshaped.items())),
        notes=tuple(dict.fromkeys(note for report in everyone for note in report.notes)),
    )


def _union(keys: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(sorted({key for of_rank in keys for key in of_rank}))
