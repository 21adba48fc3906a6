"""Compare the content of a checkpoint with its manifest: in one process, or shared by the ranks that load it.

One chunk is in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_fsdp.checkpoint import manifest
from megatron_fsdp.checkpoint.folder import METADATA, CheckpointFolder
from megatron_fsdp.checkpoint.inspect import COMMON_FILE, MARKER, read_common_file, side_file_problems
from megatron_fsdp.checkpoint.manifest import CHECKSUM_NAME, Manifest, checksum_box, combine
from megatron_fsdp.checkpoint.report import listed
from megatron_fsdp.checkpoint.safe_read import printable, reading, shortened
from megatron_fsdp.errors import CheckpointError

KNOWN_FILES = frozenset({METADATA, manifest.FILE_NAME, MARKER, COMMON_FILE, "integrity.json"})
"""Files that this library, torch or Megatron puts beside the data."""
NO_MANIFEST = "no manifest: contents read but not compared"
NOT_READ = "contents not read"
_SHOWN, _SHOWN_IN_ERROR = 20, 8


def share_out(sizes: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return the indices of the items for one of several ranks, balanced by bytes.

    The largest first, in turns back and forth, so that no two ranks differ by more than the largest item.
    """
    mine = []
    for position, index in enumerate(sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))):
        turn, place = divmod(position, ranks)
        if (place if turn % 2 == 0 else ranks - 1 - place) == rank:
            mine.append(index)
    return sorted(mine)


def _share_of(folder: CheckpointFolder, rank: int, ranks: int, without: Collection[str] = ()) -> list[str]:
    """Return the keys that one of several ranks reads, except those of some sections."""
    sizes = {key: entry.nbytes for key, entry in folder.tensors.items()}
    sizes |= {key: entry.span.length for key, entry in folder.objects.items()}
    keys = [key for key in sizes if key.partition(".")[0] not in without]
    return [keys[at] for at in share_out([sizes[key] for key in keys], rank, ranks)]


def _content_problems(
    folder: CheckpointFolder, manifest: Manifest, keys: Collection[str], *, thorough: bool = False
) -> dict[str, str]:
    """Read tensors and objects, and describe their damage; entries without a manifest are only read.

    `thorough` compares the CRC-32s that torch stored too, which name the chunk, and reads objects as data.
    """
    found: dict[str, str] = {}
    with folder.kept_open():
        for key in keys:
            try:
                if key in folder.objects:
                    raw = folder.read_bytes(key)
                    if key in manifest.objects and hashlib.sha256(raw).hexdigest() != manifest.objects[key]:
                        found[key] = "holds other bytes than were saved"
                    if thorough:
                        folder.read_object(key)
                    continue
                entry, total = folder.tensors[key], 0
                for number, chunk in enumerate(entry.chunks):
                    values = folder.read_chunk(key, number, check=thorough)
                    if key in manifest.tensors:
                        with reading(key):
                            total = combine([total, checksum_box(values, chunk.box.offsets, entry.shape)])
                    del values  # before the next one is read
                if key in manifest.tensors and f"{total:016x}" != manifest.tensors[key].checksum:
                    where = ", ".join(sorted({chunk.span.file for chunk in entry.chunks}))
                    told = f" (as it was written, so another one stands in its place in {where})" if thorough else ""
                    found[key] = f"holds other values than were saved{told}"
            except CheckpointError as error:
                found[key] = f"cannot be read: {error}"
    return found


def require_sound(folder: CheckpointFolder, rank: int, ranks: int, without: Collection[str] = ()) -> str:
    """Verify this rank's share of a checkpoint, whose names were compared when it was opened; describe the check."""
    if folder.manifest is None:
        raise CheckpointError(f"{folder.path} has no manifest to compare with; load it without verify=True")
    if folder.manifest.checksum_name != CHECKSUM_NAME:
        raise CheckpointError(
            f"{folder.path}: the manifest has checksums of kind {folder.manifest.checksum_name!r}, and this version "
            f"knows {CHECKSUM_NAME!r}; use the version that wrote it"
        )
    problems = _content_problems(folder, folder.manifest, _share_of(folder, rank, ranks, without))
    if problems:
        told = [f"{key} {problem}" for key, problem in list(problems.items())[:_SHOWN_IN_ERROR]]
        more = [f"and {len(problems) - len(told)} more"] if len(problems) > len(told) else []
        raise CheckpointError(f"{folder.path} is damaged: {'; '.join([*told, *more])}; use another checkpoint")
    looked_at = _share_of(folder, 0, 1, without)
    tensors = sum(key in folder.tensors for key in looked_at)
    return f"verified: {tensors} tensors and {len(looked_at) - tensors} objects are as they were saved"


@dataclass(frozen=True)
class Finding:
    """One problem of a checkpoint: the damage of a key, or of a file."""

    kind: Literal["tensor", "object", "file"]
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} {shortened(self.name, 1000)}: {self.reason}"


@dataclass
class VerifyReport:
    """The findings of a verification of `folder`.

    `damaged` are entries that exist and are wrong, `unexpected` tensors and objects that the manifest lacks, and files
    that belong to nothing, `unverified` entries that were not compared; `nbytes` is the size of the data that was read.
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
        """True if nothing is damaged or missing, and only files are unexpected."""
        return not (self.damaged or self.missing or any(found.kind != "file" for found in self.unexpected))

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
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
            lines += listed(title, getattr(self, title), _SHOWN)
        reasons = Counter(found.reason for found in self.unverified)
        for reason, count in sorted(reasons.items())[:_SHOWN]:
            lines.append(f"unverified, {count} of {self.tensors + self.objects} tensors and objects: {reason}")
        return "\n".join(lines)


def verify(folder: str | Path, *, deep: bool = True) -> VerifyReport:
    """Check one checkpoint of any program for damage.

    Args:
        folder: With `.metadata` in it.
        deep: Read every tensor and object, and compare with the manifest; False: names, shapes and files only.

    Returns:
        The findings; damage of any kind is in them and not raised.

    Raises:
        CheckpointError: It is not a folder.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the folder of one checkpoint")
    report, sealed = VerifyReport(str(path)), None
    try:
        sealed = Manifest.read(path)
    except CheckpointError as error:
        report.damaged.append(Finding("file", manifest.FILE_NAME, str(error)))
    if not (path / METADATA).exists():
        report.missing.append(Finding("file", METADATA, "without it nothing can be read, and saving did not finish"))
        return report
    try:
        opened = CheckpointFolder(path, check=False)
    except CheckpointError as error:
        report.damaged.append(Finding("file", METADATA, str(error)))
        return report
    report.tensors, report.objects = len(opened.tensors), len(opened.objects)
    files = opened.file_problems()
    _check_files(opened, files, report)
    known = sealed or Manifest({}, {})
    differing = {} if sealed is None else opened.differences(known)
    for key, problem in differing.items():
        is_tensor = key in opened.tensors or (key not in opened and key in known.tensors)
        found = Finding("tensor" if is_tensor else "object", printable(key, 4096), problem)
        both = report.damaged if key in known else report.unexpected
        (both if key in opened else report.missing).append(found)
    keys = [key for key in (*opened.tensors, *opened.objects) if key not in differing or key not in known]
    same_kind = known if known.checksum_name == CHECKSUM_NAME else Manifest({}, {})
    problems = {key: f"{span.file} {files[span.file]}" for key, span in opened.spans() if span.file in files}
    if deep:
        problems |= _content_problems(opened, same_kind, [key for key in keys if key not in problems], thorough=True)
        report.nbytes = sum(entry.nbytes for entry in opened.tensors.values())
        report.nbytes += sum(entry.span.length for entry in opened.objects.values())
    without = NO_MANIFEST if sealed is None else "the manifest does not know it"
    if known is not same_kind:
        without = f"the manifest has checksums of another kind, {printable(known.checksum_name):.50}"
    for key in keys:
        kind: Literal["tensor", "object"] = "tensor" if key in opened.tensors else "object"
        if key in problems:
            report.damaged.append(Finding(kind, key, problems[key]))
        elif not deep or key not in same_kind:
            report.unverified.append(Finding(kind, key, without if deep else NOT_READ))
    return report


def _check_files(opened: CheckpointFolder, problems: Mapping[str, str], report: VerifyReport) -> None:
    for name, problem in problems.items():
        missing = not (opened.path / name).exists()
        (report.missing if missing else report.damaged).append(Finding("file", name, problem))
    for side in side_file_problems(opened):
        (report.missing if side.state == "missing" else report.damaged).append(Finding("file", side.name, side.reason))
    known = {*opened.files, *KNOWN_FILES}
    try:
        present = sorted(opened.path.iterdir())
    except OSError as error:
        report.damaged.append(Finding("file", ".", f"cannot be listed: {error.strerror}"))
        return
    for path in present:
        if path.name not in known:
            what = "folder" if path.is_dir() else "file"
            report.unexpected.append(Finding("file", printable(path.name), f"a {what} that no part of it points to"))
    if (opened.path / COMMON_FILE).is_file():
        try:
            read_common_file(opened)
        except CheckpointError as error:
            report.damaged.append(Finding("file", COMMON_FILE, str(error)))
