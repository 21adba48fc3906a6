"""Compare what a checkpoint holds with what its manifest says, one chunk at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from megatron_fsdp.checkpoint import checksum
from megatron_fsdp.checkpoint.checksum import checksum_box, combine
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.manifest import Manifest
from megatron_fsdp.errors import CheckpointError


def share_of(folder: CheckpointFolder, rank: int, ranks: int) -> list[str]:
    """The keys that one of several ranks looks at, about equal in bytes: the largest first, in turns back and forth."""
    sizes = {key: entry.nbytes for key, entry in folder.tensors.items()}
    sizes |= {key: entry.span.length for key, entry in folder.objects.items()}
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
    found = {}
    for key in keys:
        problem = (
            _tensor_problem(folder, manifest, key) if key in folder.tensors else _object_problem(folder, manifest, key)
        )
        if problem is not None:
            found[key] = problem
    return found


def key_problems(folder: CheckpointFolder, manifest: Manifest) -> dict[str, str]:
    """Keys that only one of checkpoint and manifest has, in words."""
    listed, there = manifest.tensors.keys() | manifest.objects.keys(), folder.tensors.keys() | folder.objects.keys()
    missing = dict.fromkeys(sorted(listed - there), "is in the manifest and not in the checkpoint")
    return missing | dict.fromkeys(sorted(there - listed), "is in the checkpoint and not in the manifest")


def require_sound(folder: CheckpointFolder, rank: int, ranks: int) -> str:
    """Check this rank's share of a checkpoint, and all its names.

    Returns:
        What was done, for the report.

    Raises:
        CheckpointError: Something is damaged; names it. Or there is no manifest.
    """
    manifest = Manifest.read(folder.path)
    if manifest is None:
        raise CheckpointError(f"{folder.path} has no manifest to compare with; load it without verify=True")
    problems = key_problems(folder, manifest) | content_problems(folder, manifest, share_of(folder, rank, ranks))
    if problems:
        raise CheckpointError(f"{folder.path} is damaged: {_listed(problems)}; use another checkpoint")
    return f"verified: {len(folder.tensors)} tensors and {len(folder.objects)} objects are as they were saved"


def _listed(problems: dict[str, str], shown: int = 8) -> str:
    told = [f"{key} {problem}" for key, problem in list(problems.items())[:shown]]
    more: Sequence[str] = [f"and {len(problems) - shown} more"] if len(problems) > shown else []
    return "; ".join([*told, *more])


def _tensor_problem(folder: CheckpointFolder, manifest: Manifest, key: str) -> str | None:
    entry, seal = folder.tensors[key], manifest.tensors.get(key)
    if seal is None:
        return None if key not in manifest.objects else "is a tensor, and an object in the manifest"
    if entry.shape != seal.shape or str(entry.dtype) != seal.dtype:
        return f"is {entry.shape} of {entry.dtype}, and {seal.shape} of {seal.dtype} in the manifest"
    try:
        sums = [
            checksum_box(folder.read_chunk(key, index, check=True), chunk.box.offsets, entry.shape)
            for index, chunk in enumerate(entry.chunks)
        ]
    except CheckpointError as error:
        return f"cannot be read: {error}"
    return None if f"{combine(sums):016x}" == seal.checksum else "holds other values than were saved"


def _object_problem(folder: CheckpointFolder, manifest: Manifest, key: str) -> str | None:
    digest = manifest.objects.get(key)
    if digest is None:
        return None if key not in manifest.tensors else "is an object, and a tensor in the manifest"
    try:
        raw = folder.read_bytes(key)
    except CheckpointError as error:
        return f"cannot be read: {error}"
    return None if hashlib.sha256(raw).hexdigest() == digest else "holds other bytes than were saved"
