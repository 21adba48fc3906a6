"""Compare what a checkpoint holds with what its manifest says, one chunk at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence

from megatron_fsdp.checkpoint import checksum
from megatron_fsdp.checkpoint.checksum import checksum_box, combine
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.manifest import Manifest
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
        raise CheckpointError(f"{folder.path} is damaged: {_listed(problems)}; use another checkpoint")
    looked_at = share_of(folder, 0, 1, without)
    tensors = sum(key in folder.tensors for key in looked_at)
    return f"verified: {tensors} tensors and {len(looked_at) - tensors} objects are as they were saved"


def _listed(problems: dict[str, str], shown: int = 8) -> str:
    told = [f"{key} {problem}" for key, problem in list(problems.items())[:shown]]
    more: Sequence[str] = [f"and {len(problems) - shown} more"] if len(problems) > shown else []
    return "; ".join([*told, *more])
