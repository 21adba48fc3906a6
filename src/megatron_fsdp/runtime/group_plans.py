"""The plans of a model's parameter groups; groups of equal shapes, as equal blocks have, share what they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.grouping import ParameterGroupSpec
from megatron_fsdp.runtime.sharding import Sharding
from megatron_fsdp.unit.group_plan import GroupPlan

Frames = tuple[ShardFrame, ...]


class GroupPlans:
    """Plans groups, those that are alike once.

    Args:
        sharding: How to shard.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._known: dict[object, tuple[GroupPlan, Frames]] = {}

    def plan(self, spec: ParameterGroupSpec, originals: Sequence[nn.Parameter]) -> tuple[GroupPlan, Frames]:
        """Everything about one group, and for each parameter who holds which of its elements.

        Args:
            spec: The group.
            originals: Its parameters as the modules hold them; only their description is read.
        """
        parts = self._sharding.parts_of(spec, originals)
        alike = (spec.key, tuple((info.shape, info.granularity) for info in spec.parameters), parts)
        known = self._known.get(alike)
        if known is None:
            plan = self._sharding.plan_group(spec, originals)
            known = self._known[alike] = plan, tuple(plan.frame(index) for index in range(len(originals)))
            return known
        plan, frames = known
        return replace(plan, spec=spec), tuple(frame.for_another() for frame in frames)
