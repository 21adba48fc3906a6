"""Which stored tensors belong to which tensors of a model; decided from names and shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from megatron_fsdp.checkpoint.hf.live import LiveTensor
from megatron_fsdp.checkpoint.hf.names import file_tensors, is_ignored, key_variants, other_file_keys
from megatron_fsdp.checkpoint.hf.parts import CannotFollowError, FileTensor, Part
from megatron_fsdp.checkpoint.hf.safetensors_format import StoredTensor
from megatron_fsdp.checkpoint.report import LoadReport

Source = tuple[Part, StoredTensor]
_Described = list[tuple[str, FileTensor]]


@dataclass(frozen=True)
class Wanted:
    """A tensor of the model and where it is stored.

    Attributes:
        live: The tensor.
        sources: Parts of it, each in a stored tensor.
        doubles: Where the same tied weight is stored once more, by the name that it has there.
    """

    live: LiveTensor
    sources: tuple[Source, ...]
    doubles: Mapping[str, tuple[Source, ...]]


@dataclass
class Match:
    """What fits and what does not.

    Attributes:
        wanted: What can be loaded.
        missing: Names of tensors that are not stored, or not completely.
        unexpected: Stored keys that nothing in the model is made of.
        reshaped: Stored keys of another shape, with the stored shape and the one wanted.
        notes: For the report.
    """

    wanted: list[Wanted] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def report(self) -> LoadReport:
        """What this rank found."""
        loaded = tuple(wanted.live.name for wanted in self.wanted)
        return LoadReport(loaded, tuple(self.missing), tuple(self.unexpected), dict(self.reshaped), tuple(self.notes))


def merge_reports(reports: Sequence[LoadReport]) -> LoadReport:
    """One report of what ranks found, whose models may differ (pipeline stages, experts)."""
    expected = [set(report.unexpected) for report in reports[1:]]
    return LoadReport(
        loaded=_union(report.loaded for report in reports),
        missing=_union(report.missing for report in reports),
        unexpected=tuple(key for key in reports[0].unexpected if all(key in keys for keys in expected)),
        reshaped={key: shapes for report in reports for key, shapes in report.reshaped.items()},
        notes=_union(report.notes for report in reports),
    )


def _union(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))


def match_tensors(module: nn.Module, live: Sequence[LiveTensor], stored: Mapping[str, StoredTensor]) -> Match:
    """Find every tensor of a model among stored ones.

    A tensor is looked for as transformers would store it (experts one by one), then under its own name, each with and
    without the prefix of the base model, and at last under names that transformers renames. A tied weight may be
    stored under any of its names.

    Args:
        module: The unwrapped model.
        live: Its tensors.
        stored: What is stored, by key.
    """
    return _Matcher(module, live, stored).match()


class _Matcher:
    """One search; `found` grows while it goes on."""

    def __init__(self, module: nn.Module, live: Sequence[LiveTensor], stored: Mapping[str, StoredTensor]) -> None:
        self._module = module
        self._live = live
        self._stored = stored
        self._shapes = {name: tensor.shape for tensor in live for name in tensor.aliases}
        self._used: set[str] = set()
        self._by_name: dict[str, _Described] = {}
        self.found = Match()

    def match(self) -> Match:
        self._learn_file_tensors()
        lost = [tensor for tensor in self._live if not self._place(tensor, self._places(tensor.aliases))]
        renamed = self._renamed({name for tensor in lost for name in tensor.aliases})
        lost = [tensor for tensor in lost if not self._place(tensor, {a: renamed.get(a, []) for a in tensor.aliases})]
        for tensor in lost:
            self._note_missing(tensor)
        self._note_unexpected()
        return self.found

    def _learn_file_tensors(self) -> None:
        try:
            described = file_tensors(self._module, self._shapes)
        except CannotFollowError as error:
            described = {}
            self.found.notes.append(f"tensors were looked for only as the model names them: {error}")
        for key, tensor in described.items():
            for name in tensor.names:
                self._by_name.setdefault(name, []).append((key, tensor))

    # ---- where tensors are stored -----------------------------------------------------------------------------------

    def _places(self, names: Sequence[str]) -> dict[str, _Described]:
        """For each name the stored keys of its tensor with what belongs in them; none where it is not stored."""
        return {name: self._stored_as(self._by_name.get(name, [])) or self._stored_as_it_is(name) for name in names}

    def _stored_as_it_is(self, name: str) -> _Described:
        return self._stored_as([(name, FileTensor.of(name, self._shapes[name]))])

    def _stored_as(self, described: _Described) -> _Described:
        keys = [(self._stored_key(key), tensor) for key, tensor in described]
        found = [(key, tensor) for key, tensor in keys if key is not None]
        return found if len(found) == len(described) else []

    def _stored_key(self, key: str) -> str | None:
        return next((variant for variant in key_variants(self._module, key) if variant in self._stored), None)

    def _renamed(self, names: set[str]) -> dict[str, _Described]:
        """Stored keys that nothing has been found for and that transformers renames to one of these names."""
        if not names:
            return {}
        others = other_file_keys(self._module, sorted(self._stored.keys() - self._used))
        return {name: [(key, FileTensor.of(name, self._shapes[name]))] for key, name in others.items() if name in names}

    # ---- what was found ---------------------------------------------------------------------------------------------

    def _place(self, live: LiveTensor, places: Mapping[str, _Described]) -> bool:
        """Note where a tensor is stored; False where it is nowhere."""
        stored = {name: places[name] for name in (live.name, *live.aliases) if places[name]}
        if not stored:
            return False
        fits = True
        for described in stored.values():
            for key, tensor in described:
                self._used.add(key)
                if self._stored[key].shape != tensor.shape:
                    self.found.reshaped[key] = (self._stored[key].shape, tensor.shape)
                    fits = False
        if fits:
            sources = {name: self._sources(name, described) for name, described in stored.items()}
            first, *others = sources
            keys = {entry.key for _, entry in sources[first]}
            doubles = {name: sources[name] for name in others if keys.isdisjoint(e.key for _, e in sources[name])}
            self.found.wanted.append(Wanted(live, sources[first], doubles))
        return True

    def _sources(self, name: str, described: _Described) -> tuple[Source, ...]:
        return tuple(
            (part, self._stored[key]) for key, tensor in described for part in tensor.parts if part.name == name
        )

    def _note_missing(self, live: LiveTensor) -> None:
        if is_ignored(self._module, "_keys_to_ignore_on_load_missing", live.aliases):
            self.found.notes.append(f"{live.name} is not stored and kept its value, as the model allows")
            return
        self.found.missing.append(live.name)
        keys = [key for key, _ in self._by_name.get(live.name, [])]
        there = [stored for key in keys if (stored := self._stored_key(key)) is not None]
        self._used.update(there)
        if there:
            absent = next(key for key in keys if self._stored_key(key) is None)
            self.found.notes.append(f"{live.name} is stored only in part: {len(there)} of {len(keys)}, not {absent}")

    def _note_unexpected(self) -> None:
        for key in sorted(self._stored.keys() - self._used):
            if is_ignored(self._module, "_keys_to_ignore_on_load_unexpected", [key]):
                self.found.notes.append(f"{key} is stored and was left out, as the model asks")
            else:
                self.found.unexpected.append(key)
