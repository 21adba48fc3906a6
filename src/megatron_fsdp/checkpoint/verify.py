"""Compare what a checkpoint holds with what its manifest says: by one process, or shared by the ranks that load it.

One chunk is in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_fsdp.checkpoint import checksum, manifest
from megatron_fsdp.checkpoint.checksum import checksum_box, combine
from megatron_fsdp.checkpoint.folder import METADATA, CheckpointFolder, TensorEntry
from megatron_fsdp.checkpoint.manifest import Manifest
from megatron_fsdp.checkpoint.safe_read import load_object, open_file, printable, reading, shortened
from megatron_fsdp.checkpoint.tools.side_files import noted_files, side_file_problems
from megatron_fsdp.errors import CheckpointError


def share_of(folder: CheckpointFolder, rank: int, ranks: int, without: Collection[str] = ()) -> list[str]:
    """The keys that one of several ranks looks at, about equal in bytes: the largest first, in turns back and forth.

    Args:
        folder: The checkpoint.
        rank: Which.
        ranks: How many share the work.
        without: Sections that nobody looks at.
    """
    sizes = {key: entry.nbytes for key, entry in folder.tensors.items()}
    sizes |= {key: entry.span.length for key, entry in folder.objects.items()}
    sizes = {key: size for key, size in sizes.items() if key.partition(".")[0] not in without}
    mine = []
    for position, key in enumerate(sorted(sizes, key=lambda key: (-sizes[key], key))):
        turn, place = divmod(position, ranks)
        if (place if turn % 2 == 0 else ranks - 1 - place) == rank:
            mine.append(key)
    return mine


def content_problems(folder: CheckpointFolder, manifest: Manifest, keys: Iterable[str]) -> dict[str, str]:
    """What is wrong with tensors and objects, in words, by key.

    Args:
        folder: The checkpoint.
        manifest: Of the checkpoint.
        keys: Which to read.

    Raises:
        CheckpointError: The manifest's checksums are of a kind that this version does not know.
    """
    if manifest.checksum_name != checksum.NAME:
        raise CheckpointError(
            f"{folder.path}: the manifest has checksums of kind {manifest.checksum_name!r}, and this version knows "
            f"{checksum.NAME!r}; use the version that wrote it"
        )
    keys, found = list(keys), dict[str, str]()
    sums: dict[str, int] = {}
    with folder.kept_open():
        for key, index in _in_order_of_files(folder, manifest, keys, found):
            try:
                if index is None:
                    if hashlib.sha256(folder.read_bytes(key)).hexdigest() != manifest.objects[key]:
                        found[key] = "holds other bytes than were saved"
                elif key not in found:
                    entry, chunk = folder.tensors[key], folder.tensors[key].chunks[index]
                    values = folder.read_chunk(key, index, check=True)
                    sums[key] = combine([sums.get(key, 0), checksum_box(values, chunk.box.offsets, entry.shape)])
            except CheckpointError as error:
                found[key] = f"cannot be read: {error}"
    sealed = [key for key in keys if key in folder.tensors and key in manifest.tensors]
    other = {key for key in sealed if f"{sums.get(key, 0):016x}" != manifest.tensors[key].checksum}
    return {**dict.fromkeys(sorted(other), "holds other values than were saved"), **found}


def _in_order_of_files(
    folder: CheckpointFolder, manifest: Manifest, keys: Iterable[str], problems: dict[str, str]
) -> list[tuple[str, int | None]]:
    """What there is to read of some keys, in the order in which it lies: keys and chunks, None for objects.

    Args:
        folder: The checkpoint.
        manifest: Of the checkpoint.
        keys: Which.
        problems: Gets those of keys of which nothing has to be read.
    """
    places: list[tuple[str, int, str, int | None]] = []
    for key in keys:
        if key in folder.objects:
            span = folder.objects[key].span
            if key in manifest.objects:
                places.append((span.file, span.offset, key, None))
            elif key in manifest.tensors:
                problems[key] = "is an object, and a tensor in the manifest"
            continue
        entry, seal = folder.tensors[key], manifest.tensors.get(key)
        if seal is None:
            if key in manifest.objects:
                problems[key] = "is a tensor, and an object in the manifest"
        elif entry.shape != seal.shape or str(entry.dtype) != seal.dtype:
            problems[key] = f"is {entry.shape} of {entry.dtype}, and {seal.shape} of {seal.dtype} in the manifest"
        else:
            places += [(chunk.span.file, chunk.span.offset, key, index) for index, chunk in enumerate(entry.chunks)]
    return [(key, index) for _, _, key, index in sorted(places, key=lambda place: place[:2])]


def key_problems(folder: CheckpointFolder, manifest: Manifest) -> dict[str, str]:
    """Keys that only one of checkpoint and manifest has, in words."""
    listed, there = manifest.tensors.keys() | manifest.objects.keys(), folder.tensors.keys() | folder.objects.keys()
    missing = dict.fromkeys(sorted(listed - there), "is in the manifest and not in the checkpoint")
    return missing | dict.fromkeys(sorted(there - listed), "is in the checkpoint and not in the manifest")


def require_sound(folder: CheckpointFolder, rank: int, ranks: int, without: Collection[str] = ()) -> str:
    """Check this rank's share of a checkpoint, and all its names.

    Args:
        folder: The checkpoint.
        rank: This one.
        ranks: How many share the work.
        without: Sections whose contents are not looked at.

    Returns:
        What was done, for the report.

    Raises:
        CheckpointError: Something is damaged; names it. Or there is no manifest.
    """
    manifest = Manifest.read(folder.path)
    if manifest is None:
        raise CheckpointError(f"{folder.path} has no manifest to compare with; load it without verify=True")
    mine = share_of(folder, rank, ranks, without)
    problems = key_problems(folder, manifest) | content_problems(folder, manifest, mine)
    if problems:
        raise CheckpointError(f"{folder.path} is damaged: {_told(problems)}; use another checkpoint")
    looked_at = share_of(folder, 0, 1, without)
    tensors = sum(key in folder.tensors for key in looked_at)
    return f"verified: {tensors} tensors and {len(looked_at) - tensors} objects are as they were saved"


def _told(problems: dict[str, str], shown: int = 8) -> str:
    told = [f"{key} {problem}" for key, problem in list(problems.items())[:shown]]
    more: Sequence[str] = [f"and {len(problems) - shown} more"] if len(problems) > shown else []
    return "; ".join([*told, *more])


COMMON_FILE = "common.pt"
KNOWN_FILES = frozenset({METADATA, manifest.FILE_NAME, "metadata.json", COMMON_FILE, "integrity.json"})
"""Files that this library, torch or Megatron puts beside the data."""

NO_MANIFEST = "no manifest: contents read but not compared"
NOT_READ = "contents not read"
_SHOWN = 20


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        kind: What it is.
        name: Key of a tensor or object, or name of a file.
        reason: In words.
    """

    kind: Literal["tensor", "object", "file"]
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} {shortened(self.name, 1000)}: {self.reason}"


@dataclass
class VerifyReport:
    """What was found, by name.

    Attributes:
        folder: The checkpoint.
        tensors: How many tensors it holds.
        objects: How many objects.
        nbytes: Bytes of tensors and objects that were read.
        damaged: What is there and wrong.
        missing: What should be there and is not.
        unexpected: Tensors and objects of which the manifest does not know, and files that belong to nothing.
        unverified: What could be read, or was not, and was not compared with anything.
    """

    folder: str
    tensors: int = 0
    objects: int = 0
    nbytes: int = 0
    damaged: list[Finding] = field(default_factory=list)
    missing: list[Finding] = field(default_factory=list)
    unexpected: list[Finding] = field(default_factory=list)
    unverified: list[Finding] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is damaged or missing, and nothing but files is there that nobody saved."""
        return not (self.damaged or self.missing or any(found.kind != "file" for found in self.unexpected))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"is_whole": self.is_whole, **asdict(self)}

    def __str__(self) -> str:
        verdict = "whole" if self.is_whole else "DAMAGED"
        head = (
            f"{self.folder}: {verdict} ({self.tensors} tensors, {self.objects} objects, {self.nbytes} bytes read; "
            f"{len(self.damaged)} damaged, {len(self.missing)} missing, {len(self.unexpected)} unexpected, "
            f"{len(self.unverified)} unverified)"
        )
        lines = [head]
        for title in ("damaged", "missing", "unexpected"):
            lines += _listed(title, getattr(self, title))
        reasons = sorted({found.reason for found in self.unverified})
        for reason in reasons[:_SHOWN]:
            count = sum(found.reason == reason for found in self.unverified)
            lines.append(f"unverified, {count} of {self.tensors + self.objects} tensors and objects: {reason}")
        return "\n".join(lines)


def verify(folder: str | Path, *, deep: bool = True) -> VerifyReport:
    """Look for damage in one checkpoint; whatever wrote it.

    Args:
        folder: With `.metadata` in it.
        deep: Read every tensor and object, and compare with the manifest; False: names, shapes and files only.

    Returns:
        What was found; damage of any kind is in it and not raised.

    Raises:
        CheckpointError: It is not a folder.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the folder of one checkpoint")
    report = VerifyReport(str(path))
    sealed = _read_manifest(path, report)
    if not (path / METADATA).exists():
        report.missing.append(Finding("file", METADATA, "without it nothing can be read, and saving did not finish"))
        return report
    try:
        opened = CheckpointFolder(path, check=False)
    except CheckpointError as error:
        report.damaged.append(Finding("file", METADATA, str(error)))
        return report
    report.tensors, report.objects = len(opened.tensors), len(opened.objects)
    problems = opened.file_problems()
    _check_files(opened, problems, {} if sealed is None else sealed.facts, report)
    if sealed is not None:
        _compare_names(opened, sealed, report)
    for key, entry in opened.tensors.items():
        outcome = _check_names(entry, sealed, problems)
        if outcome == _FINE:
            outcome = _check_tensor(opened, entry, sealed) if deep else _UNREAD
        _note(report, "tensor", key, outcome)
    for key in opened.objects:
        problem = problems.get(opened.objects[key].span.file)
        outcome = ("damaged", f"{opened.objects[key].span.file} {problem}") if problem else _UNREAD
        _note(report, "object", key, _check_object(opened, key, sealed) if deep and not problem else outcome)
    if deep:
        report.nbytes = sum(entry.nbytes for entry in opened.tensors.values())
        report.nbytes += sum(entry.span.length for entry in opened.objects.values())
    return report


def _read_manifest(path: Path, report: VerifyReport) -> Manifest | None:
    try:
        return Manifest.read(path)
    except CheckpointError as error:
        report.damaged.append(Finding("file", manifest.FILE_NAME, str(error)))
        return None


def _check_files(
    opened: CheckpointFolder, problems: Mapping[str, str], facts: Mapping[str, Any], report: VerifyReport
) -> None:
    for name, problem in problems.items():
        missing = not (opened.path / name).exists()
        (report.missing if missing else report.damaged).append(Finding("file", name, problem))
    beside = side_file_problems(opened, facts)
    for side in beside:
        (report.missing if side.state == "missing" else report.damaged).append(
            Finding("file", printable(side.name), side.reason)
        )
    known = {*opened.files, *KNOWN_FILES, *noted_files(facts), *(side.name for side in beside)}
    try:
        present = sorted(opened.path.iterdir())
    except OSError as error:
        report.damaged.append(Finding("file", ".", f"cannot be listed: {error.strerror}"))
        return
    for path in present:
        if path.name not in known:
            what = "folder" if path.is_dir() else "file"
            report.unexpected.append(Finding("file", printable(path.name), f"a {what} that no part of it points to"))
    common = opened.path / COMMON_FILE
    if common.is_file():
        try:
            with open_file(common) as stream:
                load_object(stream.read(), str(common))
        except (CheckpointError, OSError) as error:
            report.damaged.append(Finding("file", COMMON_FILE, str(error)))


def _compare_names(opened: CheckpointFolder, sealed: Manifest, report: VerifyReport) -> None:
    kinds: tuple[tuple[Literal["tensor", "object"], Any, Any], ...] = (
        ("tensor", sealed.tensors, opened.tensors),
        ("object", sealed.objects, opened.objects),
    )
    for kind, known, present in kinds:
        for key in sorted(known.keys() - present.keys()):
            report.missing.append(Finding(kind, printable(key, 4096), f"in {manifest.FILE_NAME} and not in {METADATA}"))
        for key in sorted(present.keys() - known.keys()):
            report.unexpected.append(Finding(kind, key, f"in {METADATA} and not in {manifest.FILE_NAME}"))


Outcome = tuple[Literal["fine", "damaged", "unverified"], str]
_FINE: Outcome = ("fine", "")
_UNREAD: Outcome = ("unverified", NOT_READ)


def _note(report: VerifyReport, kind: Literal["tensor", "object"], key: str, outcome: Outcome) -> None:
    state, reason = outcome
    if state != "fine":
        (report.damaged if state == "damaged" else report.unverified).append(Finding(kind, key, reason))


def _check_tensor(opened: CheckpointFolder, entry: TensorEntry, sealed: Manifest | None) -> Outcome:
    """Read one tensor and compare it, as far as there is something to compare it with."""
    if not _is_comparable(sealed, sealed.tensors if sealed else {}, entry.key) or sealed is None:
        try:
            for index in range(len(entry.chunks)):
                opened.read_chunk(entry.key, index, check=True)
        except CheckpointError as error:
            return "damaged", str(error)
        return "unverified", _why(sealed)
    try:
        with reading(entry.key):
            problem = content_problems(opened, sealed, [entry.key]).get(entry.key)
    except CheckpointError as error:
        return "damaged", str(error)
    return _FINE if problem is None else ("damaged", f"{problem}{_where_changed(opened, entry)}")


def _check_object(opened: CheckpointFolder, key: str, sealed: Manifest | None) -> Outcome:
    comparable = _is_comparable(sealed, sealed.objects if sealed else {}, key)
    if comparable and sealed is not None:
        problem = content_problems(opened, sealed, [key]).get(key)
        if problem is not None:
            return "damaged", f"{problem} in {opened.objects[key].span.file}"
    try:
        opened.read_object(key)
    except CheckpointError as error:
        return "damaged", str(error)
    return _FINE if comparable else ("unverified", _why(sealed))


def _is_comparable(sealed: Manifest | None, seals: Mapping[str, Any], key: str) -> bool:
    return sealed is not None and sealed.checksum_name == checksum.NAME and key in seals


def _check_names(entry: TensorEntry, sealed: Manifest | None, problems: Mapping[str, str]) -> Outcome:
    """What can be said before a tensor is read."""
    seal = sealed.tensors.get(entry.key) if sealed else None
    if seal is not None and (seal.shape, seal.dtype) != (entry.shape, str(entry.dtype)):
        there = printable(f"{seal.shape} of {seal.dtype}")[:200]
        return "damaged", f"{METADATA} says {entry.shape} of {entry.dtype}, {manifest.FILE_NAME} {there}"
    files = dict.fromkeys(chunk.span.file for chunk in entry.chunks if chunk.span.file in problems)
    told = "; ".join(f"{name} {problems[name]}" for name in files)
    return ("damaged", told) if told else _FINE


def _where_changed(opened: CheckpointFolder, entry: TensorEntry) -> str:
    """Which chunks do not fit the CRC-32 that torch stored with them."""
    told = []
    for index in range(len(entry.chunks)):
        try:
            opened.read_chunk(entry.key, index, check=True)
        except CheckpointError as error:
            told.append(str(error))
    return f" ({'; '.join(told[:4]) or 'each chunk is as it was written, so another one stands in its place'})"


def _why(sealed: Manifest | None) -> str:
    if sealed is None:
        return NO_MANIFEST
    if sealed.checksum_name != checksum.NAME:
        return f"the manifest has checksums of another kind, {printable(sealed.checksum_name):.50}"
    return "the manifest does not know it"


def _listed(title: str, found: list[Finding]) -> list[str]:
    if not found:
        return []
    more = [f"  ... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return [f"{title}:", *(f"  {item}" for item in found[:_SHOWN]), *more]
