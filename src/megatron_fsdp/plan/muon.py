"""A model of Muon's cost: the balance of its iteration over ranks, its compute and its communication."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from megatron_fsdp.describe.text import in_bytes
from megatron_fsdp.optim.full_tensor.exchange import assign_owners
from megatron_fsdp.optim.full_tensor.muon import WAVE_BYTES, newton_schulz_flops
from megatron_fsdp.optim.optimizer import kinds_of
from megatron_fsdp.plan.machine import Machine

NEWTON_SCHULZ_STEPS = 5  # of torch.optim.Muon
_BYTES = 2  # of an element that travels, each way
_SMALL = 0.05


def muon_matrices(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of Muon's parameters: matrices and stacks, without embeddings and head."""
    named = dict(module.named_parameters())
    kinds = zip(named, kinds_of(named.values(), module), strict=True)
    return {name: tuple(named[name].shape) for name, kind in kinds if kind in ("matrices", "stacks of matrices")}


@dataclass(frozen=True)
class MuonWork:
    """The compute and communication of a Muon step that is shared over ranks by whole matrices."""

    ranks: int  # replicas included
    matrices: int  # their number; a stack counts as its matrices
    numel: int  # their elements
    flops: int  # of Newton-Schulz iteration, all ranks together
    busiest_flops: int  # of the rank that has most to do
    largest_numel: int  # elements of the largest matrix
    replicas: int = 1  # ranks that hold the same shards

    @property
    def imbalance(self) -> float:
        """The work of the busiest rank over the mean."""
        return self.busiest_flops * self.ranks / max(1, self.flops)

    @property
    def sent_bytes(self) -> float:
        """The mean bytes that a rank sends in a step, there and back to all replicas, including its own part."""
        return (1 + self.replicas) * _BYTES * self.numel / self.ranks

    @property
    def borrowed_bytes(self) -> int:
        """The most bytes that a rank borrows: all updates of its shards; three waves and a result; one iteration."""
        one = _BYTES * self.largest_numel
        own = _BYTES * self.numel * self.replicas // self.ranks
        return own + 4 * max(self.replicas * one, min(WAVE_BYTES, own)) + 4 * one

    def seconds(self, machine: Machine) -> float:
        """Estimate the time of iteration and exchange, without their overlap."""
        sent_s = machine.all_to_all_s(self.sent_bytes / 2, self.ranks)
        return machine.compute_s(self.busiest_flops, 0) + 2 * sent_s

    def summary(self, machine: Machine, tokens: int, compute_s: float) -> str:
        """Summarise the cost, and the tokens per rank and step above which it is below 5 % of the compute."""
        seconds = self.seconds(machine)
        enough = math.ceil(tokens * seconds / (_SMALL * compute_s)) if compute_s else 0
        return (
            f"{self.matrices:,} matrices, the busiest of {self.ranks:,} ranks has {self.imbalance:.2f} of the mean; "
            f"{1e3 * seconds:,.1f} ms, {in_bytes(round(self.sent_bytes))} sent by a rank; {100 * _SMALL:.0f} % of "
            f"compute at {enough:,} tokens per rank and step"
        )


def single_matrices(shapes: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return FLOPs and elements of every matrix in shapes (..., rows, columns), each matrix of a stack by itself."""
    single = [shape[-2:] for shape in shapes for _ in range(math.prod(shape[:-2]))]
    return [newton_schulz_flops(each, NEWTON_SCHULZ_STEPS) for each in single], [math.prod(each) for each in single]


def muon_work(shapes: Iterable[Sequence[int]], ranks: int, replicas: int = 1) -> MuonWork:
    """Distribute the iteration of matrices over ranks and replicas, as the optimizer does."""
    flops, numels = single_matrices(shapes)
    loads = [0] * ranks
    assign_owners(flops, loads)
    return MuonWork(ranks, len(flops), sum(numels), sum(flops), max(loads), max(numels, default=0), replicas)
