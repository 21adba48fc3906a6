"""The doors of this package, through which one random program is sharded: wrapper, buckets, in place, and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    experimental,
    fsdp2,
    fully_shard,
    fully_shard_optimizer,
)
from tests.fuzzing.case import Case, in_float64
from tests.fuzzing.model import Block, Net
from tests.fuzzing.run import Named, Ranks, Trace, differences, judge, make_optimizer, play_sharded


class Wrapped(Ranks):
    """By `fully_shard`."""

    def shard(self) -> None:
        case, mesh = self.case, self.mesh
        units = {"blocks": [Block], "auto": None, "none": [], "everything": [Block, nn.Linear]}
        hybrid = mesh["outer", "shard"]._flatten("hybrid").get_group() if case.mesh.outer else None
        self.model, self.optimizer = fully_shard(
            self.model,
            make_optimizer(case, self.model),
            device_mesh=mesh,
            dp_shard_dim="shard",
            dp_outer_dim="outer" if case.mesh.outer else None,
            hybrid_fsdp_group=hybrid,
            tp_dim="tensor" if case.mesh.tensor else None,
            fsdp_unit_modules=units[case.wrap],
            zero_dp_strategy=case.strategy,
            outer_dp_sharding_strategy=case.outer_strategy,
            mixed_precision_policy=case.policy,
            sync_model_each_microbatch=case.mode in ("plain", "no_sync"),
            **case.options,
        )

    def sync(self, last: bool) -> AbstractContextManager[None]:
        """Say in the case's way whether this is the last microbatch."""
        mode, model = self.case.mode, self.model
        if mode == "auto":
            model.set_model_auto_sync(last)
        elif mode == "last":
            model.is_last_microbatch = last
        elif mode == "mixed":
            model.set_model_auto_sync(last)
            return nullcontext() if last or self.case.seed % 2 else model.no_sync()
        return model.no_sync() if mode == "no_sync" and not last else nullcontext()

    def gradients(self) -> Named:
        return dict(self.model.full_gradients())

    def parameters(self) -> Named:
        return dict(self.model.full_parameters())

    def clip(self, max_norm: float) -> Tensor | None:
        """By the method, or by torch's function."""
        return super().clip(max_norm) if self.case.torch_clip else self.model.clip_grad_norm_(max_norm)


class InBuckets(Wrapped):
    """By `DistributedDataParallel`."""

    def shard(self) -> None:
        case, options = self.case, dict(self.case.options)
        self.model = DistributedDataParallel(
            DistributedDataParallelConfig(**options.pop("config")),
            self.model,
            self.mesh,
            dp_dim="shard",
            tp_dim="tensor" if case.mesh.tensor else None,
            sync_model_each_microbatch=case.mode in ("plain", "no_sync"),
            **options,
        )
        self.optimizer = fully_shard_optimizer(make_optimizer(case, self.model))


def _modules(model: nn.Module, wrap: str) -> Iterator[nn.Module]:
    """The modules that are sharded by a call of their own, inner ones first: units may lie inside of units."""
    assert isinstance(model, Net)
    for block in model.blocks if wrap != "none" else ():
        assert isinstance(block, Block)
        if wrap == "everything":
            yield block.core
            yield from (each for each in (block.frozen, block.unused) if each is not None)
        yield block
    if wrap == "everything" and model.head.weight is not model.embedding.weight:
        yield model.head
    yield model


class InPlace(Ranks):
    """By `experimental.fully_shard`."""

    def shard(self) -> None:
        case, dims = self.case, [name for name in ("outer", "shard") if getattr(self.case.mesh, name)]
        outer = len(dims) - 1

        def placed(inner: bool, of_outer: Placement, otherwise: Placement) -> list[Placement]:
            return [of_outer] * outer + [Shard(0) if inner else otherwise]

        placements = experimental.Placements(
            dims,
            parameter=placed(case.strategy == 3, Replicate(), Replicate()),
            gradient=placed(case.strategy >= 2, Partial("avg"), Partial("avg")),
            optimizer=placed(case.strategy >= 1, Shard(0) if case.outer_strategy else Replicate(), Replicate()),
        )
        with experimental.fully_shard_context("cpu", **case.options) as self.context:
            for module in _modules(self.model, case.wrap):
                experimental.fully_shard(module, self.mesh, placements, case.policy)
        self.optimizer = make_optimizer(case, self.model)
        experimental.fully_shard_optimizer(self.optimizer)

    def sync(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self.case.mode == "plain" else experimental.microbatch(self.context, is_last=last)


class LikeTorch(Ranks):
    """By `fsdp2.fully_shard`."""

    def shard(self) -> None:
        case = self.case
        mesh = self.mesh["outer", "shard"] if case.mesh.outer else self.mesh["shard"]
        policy = TorchPolicy(reduce_dtype=case.policy.grad_comm_dtype)
        for module in _modules(self.model, case.wrap):
            reshards = case.options["reshard_after_forward"]
            fsdp2.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
            if case.options.get("calculate_per_token_loss"):
                module.set_gradient_divide_factor(1.0)
        self.optimizer = make_optimizer(case, self.model)
        if case.options["connects"]:
            fsdp2.fully_shard_optimizer(self.optimizer)

    def sync(self, last: bool) -> AbstractContextManager[None]:
        if self.case.mode == "no_sync":
            self.model.set_requires_gradient_sync(last)
        elif self.case.mode != "plain":
            self.model.set_requires_all_reduce(last)
        return nullcontext()


DOORS: dict[str, type[Ranks]] = {
    "wrapper": Wrapped,
    "buckets": InBuckets,
    "in place": InPlace,
    "like torch": LikeTorch,
}


# ---- runs -----------------------------------------------------------------------------------------------------------


def play_doors(cases: Sequence[Case]) -> list[Trace]:
    """For a worker: one case after the other."""
    traces = []
    for case in cases:
        try:
            traces.append(play_sharded(DOORS[case.door](case)))
        except Exception as error:
            error.add_note(f"door: {case.door}, {case.options}")
            raise
    return traces


WRONG = "FAILED"
ROUNDING = "rounding (equal in float64 to 1e-9)"
UNDECIDED = "FAILED (undecided: cannot be run in float64)"
_MOST_BY_ROUNDING = 200.0
"""In tolerances; casts and copies of weights, of which float64 has none, would be wrong by more."""


def verdict(cases: Sequence[Case], run: Callable[[Sequence[Case]], list[list[Trace]]]) -> list[str]:
    """Run a program's cases, by `play_doors` on ranks; return the verdict and what differed, or nothing if nothing did.

    A door that differs a little more than allowed only rounds if it does not differ with everything in float64.
    """
    found = run(cases)
    told = judge_doors(cases, found)
    if not told or judge_doors(cases, found, _MOST_BY_ROUNDING):
        return [WRONG, *told] if told else []
    differing = [case for case, traces in zip(cases, zip(*found, strict=True), strict=True) if judge(case, traces)]
    wide = [each for case in differing if (each := in_float64(case))]
    if not wide:
        return [UNDECIDED, *told]
    again = judge_doors(wide, run(wide))
    return [WRONG, *(f"in float64, {text}" for text in again)] if again else [ROUNDING, *told]


def judge_doors(cases: Sequence[Case], found: Sequence[Sequence[Trace]], slack: float = 1.0) -> list[str]:
    """What differs from one process, and between doors whose arithmetic is the same, in words."""
    of_doors = list(zip(cases, zip(*found, strict=True), strict=True))
    told = [f"{case.door}: {text}" for case, traces in of_doors for text in judge(case, traces, slack)]
    for (case, (trace, *_)), (other, (its, *_)) in combinations(of_doors, 2):
        if _arithmetic(case) == _arithmetic(other):
            told += [f"{case.door} and {other.door}: {text}" for text in _differing_bits(case, trace, its)]
    return told


def _arithmetic(case: Case) -> object:
    """What the bits of a door's results depend on, besides the program; elements are added up in rank order."""
    mesh, options = case.mesh, case.options
    config = options.get("config", {})
    outer = mesh.outer or config.get("num_distributed_optimizer_instances", 0)
    inner = mesh.data_parallel // max(1, outer)
    if (inner > 2 and not case.strategy) or (outer > 2 and not case.outer_strategy):
        return case.door  # all-reduces add in an order of their own, which depends on the length of the message
    comes_in_parts = any(block.calls > 1 and block.checkpoint == "reentrant" for block in case.blocks)
    if comes_in_parts or case.policy.grad_comm_dtype is torch.bfloat16:
        return case.door  # parts of a gradient are added up, and rounded, when a unit is reduced: now or at the end
    waits = case.microbatches > 1 and case.mode != "plain"
    can_defer = case.door != "in place" and (case.mode == "no_sync" or (case.mode == "mixed" and not case.seed % 2))
    if case.door == "like torch":
        can_defer = case.mode == "no_sync"
    return (
        (inner, outer) if case.strategy else inner * max(1, outer),
        waits and (case.strategy < 2 or can_defer),  # whether microbatches are added up before ranks are
        config.get("average_in_collective", options.get("average_in_collective", False)),
        config.get("gradient_reduce_div_fusion", True),
        any(block.sometimes for block in case.blocks) and not options.get("find_unused_parameters"),
        # PyTorch's policy has no dtype for sums of microbatches, which have that of each parameter.
        case.door == "like torch" and case.policy.main_grads_dtype and any(b.mixed for b in case.blocks),
    )


def _differing_bits(case: Case, trace: Trace, other: Trace) -> list[str]:
    """What differs, in words, until the first update: torch's loops round the last elements of a shard in another way.

    One rank has everything in one shard, until norms clip, which are added up in several ways.
    """
    end = next(position for position, (label, _) in enumerate(trace.entries) if label in ("norm", "parameters"))
    if case.mesh.data_parallel == 1 and case.max_norm is None:
        end = len(trace.entries)
    # Losses are added up by the fuzzer, over each dimension of a door's mesh.
    both = [Trace([entry for entry in each.entries[:end] if entry[0] != "loss"]) for each in (trace, other)]
    return differences(*both, 0.0)
