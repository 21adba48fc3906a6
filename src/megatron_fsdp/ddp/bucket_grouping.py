"""Grouping of parameters into units by size in place of by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.ddp.bucket_plan import plan_buckets
from megatron_fsdp.ddp.bucket_schedule import GatherMode
from megatron_fsdp.ddp.engine import BucketEngine
from megatron_fsdp.ddp.hooks import register_bucket_hooks
from megatron_fsdp.engine.domains import Sharding
from megatron_fsdp.engine.engine import Engine, EngineParts
from megatron_fsdp.engine.schedule import ROOT
from megatron_fsdp.engine.wrap import parameter_info
from megatron_fsdp.sharding.units import UnitPlan


@dataclass(frozen=True)
class BucketGrouping:
    """Buckets of parameters; see `Grouping`.

    Attributes:
        bucket_numel: Elements that close a bucket; None: one bucket for each kind of parameter.
        gather_mode: When changed weights are gathered.
    """

    bucket_numel: int | None
    gather_mode: GatherMode

    def plan(self, module: nn.Module, sharding: Sharding) -> UnitPlan:
        """Return the buckets."""
        canonical: dict[int, str] = {}
        aliases = []
        for name, param in module.named_parameters(remove_duplicate=False):
            first = canonical.setdefault(id(param), name)
            if first != name:
                aliases.append((name, first))
        infos = [parameter_info(name, param, sharding) for name, param in module.named_parameters()]
        alone = {name for name, param in module.named_parameters() if getattr(param, "shared_embedding", False)}
        plan = plan_buckets(infos, type(module).__name__, aliases, self.bucket_numel, alone)
        return replace(plan, source=f"{plan.source}, weights gathered {self.gather_mode.value}")

    def cut_numel(self, num_ranks: int) -> int | None:  # noqa: ARG002
        """Return None: parameters outside of buckets are frozen, and not cut."""
        return None

    def make_engine(self, parts: EngineParts) -> BucketEngine:
        """Make the engine, without hooks."""
        return BucketEngine(parts, self.gather_mode)

    def connect(self, engine: Engine, modules: Mapping[int, nn.Module]) -> Sequence[RemovableHandle]:
        """Register the hooks that drive the engine."""
        assert isinstance(engine, BucketEngine)
        return register_bucket_hooks(engine, modules[ROOT])
