"""Names and shard specs of experts in checkpoints under expert parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.shard_spec import ShardSpec, describe_chunks
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.sharding.expert_plan import ExpertPlan


class ExpertNames:
    """Maps this rank's names and shards of experts to those of checkpoints, for one model."""

    def __init__(self, plan: ExpertPlan | None = None) -> None:
        self.plan = plan  # the experts of all ranks; None where no ranks hold other experts
        self.is_trivial = plan is None  # every parameter has the same name and shape in a checkpoint
        # of parameters that are saved in another spec, by name on this rank: the spec here and that one
        self.specs: dict[str, tuple[ShardSpec, ShardSpec]] = {}

    def name_of(self, name: str) -> str:
        """Return the checkpoint's name of this rank's parameter `name`."""
        return name if self.plan is None else self.plan.to_global(name)

    def name_here(self, name: str) -> str | None:
        """Return this rank's name of a checkpoint's parameter; None for another rank's expert."""
        return name if self.plan is None else self.plan.to_local(name)

    def as_saved(self, name: str, value: Any) -> Any:
        """Return a tensor that is cut as parameter `name` in the spec in which it is saved; it shares its memory."""
        own, saved = self.specs.get(name, (None, None))
        return _recut(value, own, saved)

    def as_held(self, name: str, value: Any) -> Any:
        """Return a loaded tensor in this rank's spec; from a whole tensor of all experts, this rank's part."""
        own, saved = self.specs.get(name, (None, None))
        if own is None or saved is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            return _recut(value, saved, own)
        cut = saved.description.tensor_cut
        if cut is None or not value.shape == saved.shape != own.shape:
            return value
        start, stop = saved.description.part_range()
        return value.narrow(cut.dim, start, stop - start)


TRIVIAL_NAMES = ExpertNames()
"""The names of a model of which no ranks hold other experts."""


def _recut(value: Any, old: ShardSpec | None, new: ShardSpec | None) -> Any:
    if old is None or new is None or not isinstance(value, UnevenDTensor) or value.shard_spec != old:
        return value
    return UnevenDTensor.wrap(value._local_tensor, new)


def described(value: Any) -> Any:
    """Attach chunk functions to a shard; return anything else unchanged."""
    if isinstance(value, UnevenDTensor) and not value.shard_spec.is_whole:
        describe_chunks(value, value.shard_spec)
    return value
