"""Each tensor's place in a communication bucket, as views that are made once for each bucket."""

from __future__ import annotations

import torch

from megatron_fsdp.buffer.flat_buffer import full_view
from megatron_fsdp.layout import Layout


class BucketViews:
    """Views of the buckets that a group fills; their memory comes and goes beneath them.

    Args:
        layout: Where each tensor lies in a bucket.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._made: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._made)

    def of(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        """The place of each tensor in a bucket (numel,)."""
        found = self._made.get(id(bucket))
        if found is None or found[0] is not bucket:
            views = [full_view(self._layout, bucket, i) for i in range(len(self._layout.shapes))]
            found = self._made[id(bucket)] = bucket, views
        return found[1]

    def forget(self) -> None:
        """Let go of all buckets; they may be gone."""
        self._made.clear()
