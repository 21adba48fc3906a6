"""The checkpoints of a run: published atomically, found again, and pruned."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megatron_fsdp.checkpoint.publish import FileOps, Publisher
from megatron_fsdp.checkpoint.run_folder import MARK_OF_WHOLE, POINTER, RunFolder, is_whole
from megatron_fsdp.comm.agreement import by_value, decided_by_first, gather_objects, rank_of, together, world_size_of
from megatron_fsdp.errors import CheckpointError, ConfigurationError

Writer = Callable[[Path], object]
"""Writes this rank's files of a checkpoint into a folder; called on every rank."""

_LOOK_AGAIN_S = 0.05


class CheckpointStore:
    """The folder of a run, in Megatron's convention, shared by all ranks.

        <root>/latest_checkpointed_iteration.txt      the iteration to resume from
        <root>/iter_0000010/                          a checkpoint

    A folder counts as a checkpoint when it has its published name and holds `.metadata`. All methods but `path_of` are
    collective over the group, and give the same on every rank: rank 0 looks, since a shared file system may show ranks
    different things for a while. They work without torch.distributed, too. One save at a time.

    Attributes:
        root: The folder of the run; made by the first save.
        keep_last: How many checkpoints to keep, up to the one that the pointer names; None: all.
        group: The ranks; None: all, or this process alone where torch.distributed is not initialised.

    Raises:
        ConfigurationError: `keep_last` is no whole number from 1.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        group: dist.ProcessGroup | None = None,
        patience_s: float = 10.0,
        ops: FileOps | None = None,
    ) -> None:
        """Prepare a store; nothing is written yet.

        Args:
            root: The folder of the run, on a file system that all ranks share.
            keep_last: How many checkpoints to keep; None: all.
            group: The ranks.
            patience_s: Seconds that a rank waits to see the folder that rank 0 has made.
            ops: Changes to the file system, for tests.
        """
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ConfigurationError(f"keep_last={keep_last!r}: give a whole number from 1, or None to keep all")
        self.root = Path(root)
        self.keep_last = keep_last
        self.group = group
        self._patience_s = patience_s
        self._ops = FileOps() if ops is None else ops
        self._folder = RunFolder(self.root)
        self._publisher = Publisher(self._folder, self._ops)

    def over(self, group: dist.ProcessGroup | None) -> CheckpointStore:
        """Return this store over another group of the same ranks, as a background save needs."""
        return CheckpointStore(
            self.root, keep_last=self.keep_last, group=group, patience_s=self._patience_s, ops=self._ops
        )

    # ---- finding ----------------------------------------------------------------------------------------------------

    def path_of(self, iteration: int) -> Path:
        """Return where the checkpoint of an iteration is published, whether it exists or not; not collective.

        Raises:
            ConfigurationError: The iteration is no whole number from 0.
        """
        return self._folder.path_of(iteration)

    def iterations(self) -> list[int]:
        """List the iterations with a whole checkpoint, ascending; collective.

        Raises:
            CheckpointError: The root cannot be read.
        """
        return decided_by_first(self._folder.iterations, f"looking into {self.root}", self.group)

    def latest(self) -> Path | None:
        """Return the checkpoint that the pointer names, or the newest if there is no pointer; collective.

        Returns:
            Its folder; None where there is no checkpoint yet.

        Raises:
            CheckpointError: The root is no folder or a checkpoint itself, or the pointer is invalid or names one
                that is not there; says which are.
        """
        return self._found(self._folder.latest)

    def resolve(self, iteration: int | None = None) -> Path:
        """Return the checkpoint to load; collective.

        Args:
            iteration: Which; None: the latest.

        Raises:
            CheckpointError: As `latest`, or there is no such whole checkpoint; says which are there.
            ConfigurationError: The iteration is no whole number from 0.
        """
        found = self._found(functools.partial(self._folder.resolve, iteration))
        assert found is not None
        return found

    def resolve_or_itself(self, iteration: int | None = None) -> Path:
        """Return the checkpoint to load, or the root if it is itself one and no iteration is given.

        Raises:
            CheckpointError: As `resolve`, or the root is a checkpoint and also holds those of a run.
            ConfigurationError: The iteration is no whole number from 0.
        """
        found = self._found(functools.partial(self._itself_or_one_of, iteration))
        assert found is not None
        return found

    def _itself_or_one_of(self, iteration: int | None) -> Path:
        if iteration is not None or not is_whole(self.root):
            return self._folder.resolve(iteration)
        others = self._folder.iterations()
        if others:
            newest = self._folder.find(others[-1])
            raise CheckpointError(
                f"{self.root} is a checkpoint itself (it has a {MARK_OF_WHOLE}), and the folder of a run with "
                f"checkpoints of its own; give the folder of one of these, as {newest}, or move its {POINTER} and "
                "iter_ folders elsewhere to load the other one"
            )
        return self.root

    def _found(self, find: Callable[[], Path | None]) -> Path | None:
        def name() -> str | None:
            path = find()
            return None if path is None else str(path.relative_to(self.root))

        # Below the root, and not a whole path: ranks may see the root under different ones.
        found = decided_by_first(name, f"looking into {self.root}", self.group)
        return None if found is None else self.root / found

    # ---- saving -----------------------------------------------------------------------------------------------------

    def write(self, iteration: int, writer: Writer, *, overwrite: bool = False, is_synced: bool = False) -> Path:
        """Save a whole checkpoint, or nothing; collective.

        Every rank calls the writer with the same hidden folder, in which some rank has to leave `.metadata`. Then the
        files are forced to the disk, the folder gets its name, the pointer moves to it, and old checkpoints go
        (docs/checkpoints.md says what a kill at any moment leaves). A file in the cache of another machine
        can be forced out by that machine only: a writer for several machines syncs its own files, as torch's
        `FileSystemWriter` does.

        Args:
            iteration: From 0.
            writer: What it raises on some ranks only must not leave others waiting in a collective of its own.
            overwrite: Whether a checkpoint of this iteration may be replaced.
            is_synced: Whether the writer forces its files to the disk itself.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: A rank has met an error, the ranks share no file system, or the iteration exists; the same
                message on every rank. Nothing was published, and what was written is removed.
            ConfigurationError: The iteration is no whole number from 0.
        """
        try:
            return self._write(iteration, writer, overwrite, is_synced)
        finally:
            self._publisher.end()

    def _write(self, iteration: int, writer: Writer, overwrite: bool, is_synced: bool) -> Path:
        first, name, doing = decided_by_first(
            lambda: self._begin(iteration, overwrite), f"saving iteration {iteration} in {self.root}", self.group
        )
        target = self.path_of(first)
        staging = self.root / name
        is_first = rank_of(self.group) == 0  # read now: torch.distributed may be shut down after an error
        try:
            self._require_common_ground(staging, iteration, first, doing)
            together(doing, lambda: writer(staging), self.group)
            if not is_synced:
                together(doing, lambda: self._sync_share(staging), self.group)
            decided_by_first(lambda: self._publisher.publish(staging, iteration, self.keep_last), doing, self.group)
        except BaseException:
            if is_first:
                self._publisher.discard(staging)
            raise
        return target

    def _begin(self, iteration: int, overwrite: bool) -> tuple[int, str, str]:
        """Return, on rank 0, the iteration, the name of the hidden folder, and a description for errors."""
        doing = f"saving {self.path_of(iteration)}"
        try:
            if is_whole(self.root):
                raise CheckpointError(
                    f"{self.root} is a checkpoint itself (it has a {MARK_OF_WHOLE}); save in another folder, which "
                    "holds nothing but the run's checkpoints"
                )
            return iteration, self._publisher.begin(iteration, overwrite).name, doing
        except OSError as error:
            raise CheckpointError(f"{doing} failed ({type(error).__name__}: {error})") from error

    def _require_common_ground(self, staging: Path, iteration: int, first: int, doing: str) -> None:
        """Refuse ranks that save different iterations, or do not see rank 0's folder."""
        everyone = gather_objects((iteration, self._sees(staging)), self.group)
        if any(type(theirs) is not int or theirs != first for theirs, _ in everyone):
            each = by_value([repr(theirs) for theirs, _ in everyone])
            raise CheckpointError(f"ranks save different iterations: {each}; give all the same")
        blind = [rank for rank, (_, sees) in enumerate(everyone) if not sees]
        if blind:
            raise CheckpointError(
                f"{doing} failed: rank(s) {', '.join(map(str, blind))} do not see the folder that rank 0 has made "
                "beside it; give a root on a file system that all ranks share"
            )

    def _sees(self, path: Path) -> bool:
        deadline = time.monotonic() + self._patience_s
        while not path.is_dir():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_AGAIN_S)
        return True

    def _sync_share(self, staging: Path) -> None:
        """Force this rank's share of the files to the disk; shares follow from names, not from listings."""
        ranks, rank = world_size_of(self.group), rank_of(self.group)
        for folder, _, names in os.walk(staging):
            for name in names:
                digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
                if int.from_bytes(digest) % ranks == rank:
                    self._ops.sync_file(Path(folder) / name)
