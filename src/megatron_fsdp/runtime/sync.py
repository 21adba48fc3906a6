"""When gradients are reduced: after every backward, at the last microbatch, or when told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum


class Reach(Enum):
    """How far the gradients of a backward travel."""

    NOWHERE = "nowhere"  # kept as full local sums
    INSIDE = "inside"  # over the inner ranks; the outer ones wait for the sync
    EVERYWHERE = "everywhere"


@dataclass
class SyncMode:
    """The switches that decide what happens to the gradients of the next backward.

    Attributes:
        auto_sync: Reduce and show gradients after every backward.
        is_last_microbatch: What the user said of the next backward; None where nothing was said.
        defer_all: Inside `no_sync`: reduce nothing, keep full local sums.
    """

    auto_sync: bool = True
    is_last_microbatch: bool | None = None
    defer_all: bool = False

    @property
    def syncs(self) -> bool:
        """Whether the end of the next backward is a gradient sync."""
        return not self.defer_all and (self.auto_sync or bool(self.is_last_microbatch))

    def reach(self, pending_is_sharded: bool) -> Reach:
        """How far gradients are reduced in the next backward.

        Args:
            pending_is_sharded: Gradients are held as shards between syncs (strategies 2 and 3), so they have to be
                reduced over the inner ranks each time unless everything is deferred.
        """
        if self.syncs:
            return Reach.EVERYWHERE
        return Reach.INSIDE if pending_is_sharded and not self.defer_all else Reach.NOWHERE

    @contextmanager
    def changed(
        self, *, auto_sync: bool | None = None, is_last_microbatch: bool | None = None, defer_all: bool | None = None
    ) -> Iterator[None]:
        """Change switches inside a block and restore them afterwards."""
        before = (self.auto_sync, self.is_last_microbatch, self.defer_all)
        if auto_sync is not None:
            self.auto_sync = auto_sync
        if is_last_microbatch is not None:
            self.is_last_microbatch = is_last_microbatch
        if defer_all is not None:
            self.defer_all = defer_all
        try:
            yield
        finally:
            self.auto_sync, self.is_last_microbatch, self.defer_all = before
