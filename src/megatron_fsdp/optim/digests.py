"""Digests of what ranks hold together: 64 bits that depend on every bit of the whole tensors, and on no cut.

Each element is read as an integer, times an odd weight that its tensor's name and its place decide; the digest is the
sum modulo 2**64. So the ranks' digests add up, whatever the shards and the strategy. A change of a single bit always
changes it; changes of several do, but for one in about 2**64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.fingerprint import digest
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.gradients import Inspect
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.optim.grad_norm import ProcessGroups, shared_out_over

Locals = Callable[[ParameterGroup], Sequence[torch.Tensor | None]]


def parameter_digests(engine: Engine, *, is_whole: bool = True) -> dict[str, str]:
    """Return the digest of the main weights of each unit; of this rank's part alone where not `is_whole`.

    Collective where `is_whole`: 8 bytes per unit.
    """
    return _digests(
        engine, lambda group: [group.weights.main.piece(index) for index in range(len(group.sharded))], is_whole
    )


def gradient_digests(engine: Engine, *, is_whole: bool = True) -> dict[str, str]:
    """Return the digest of the gradients of each unit, as `parameter_digests`; None adds nothing."""
    return _digests(engine, lambda group: list(group.grads()), is_whole)


@contextmanager
def digesting_backwards(engine: Engine, shift: int = 0) -> Iterator[Callable[[], list[dict[str, str]]]]:
    """Record the digests of this rank's own gradients of each backward in the block, before they are reduced.

    Args:
        engine: A deterministic one.
        shift: This rank computes what the rank so many places further would, and gradients are added up in that order.

    Yields:
        A function that returns the digests of each backward, by unit; to be called after the block.
    """
    sums: dict[int, dict[str, torch.Tensor]] = {}
    groups = [(unit.label, group) for unit in engine.units for group in unit.groups if group.gradients is not None]

    def record(label: str, group: ParameterGroup, before: Inspect | None, index: int, grad: torch.Tensor) -> None:
        if before is not None:
            before(index, grad)
        found = sums.setdefault(engine.backward_number, {unit.label: torch.zeros(()) for unit in engine.units})
        found[label] = digest(grad, group.names[index]) + found[label].to(grad.device, torch.int64)

    restore = []
    for label, group in groups:
        assert group.gradients is not None
        restore.append((group.gradients, group.gradients.inspect))
        group.gradients.inspect = partial(record, label, group, group.gradients.inspect)
        group.gradients.row_shift = shift
    try:
        yield lambda: [{label: in_hex(int(each)) for label, each in found.items()} for found in sums.values()]
    finally:
        for gradients, inspect in restore:
            gradients.inspect, gradients.row_shift = inspect, 0


def _digests(engine: Engine, locals_of: Locals, is_whole: bool) -> dict[str, str]:
    labels = [unit.label for unit in engine.units]
    sums: dict[ProcessGroups, torch.Tensor] = {}
    for position, unit in enumerate(engine.units):
        for group in unit.groups:
            for index, tensor in enumerate(locals_of(group)):
                over = shared_out_over(group, index, engine.sharding.domain(group.plan.is_expert)) if is_whole else ()
                if over not in sums:
                    sums[over] = torch.zeros(len(labels), dtype=torch.int64, device=engine.device)
                if tensor is not None:
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    start, _ = group.plan.layout.range_in(index, group.plan.main_region)
                    sums[over][position] += digest(local, group.names[index], start)
    for over, found in sums.items():
        for ranks in over:
            dist.all_reduce(found, group=ranks)
    total = sum(sums.values(), torch.zeros(len(labels), dtype=torch.int64, device=engine.device))
    return {label: in_hex(value) for label, value in zip(labels, total.tolist(), strict=True)}


def in_hex(value: int) -> str:
    """Return 64 bits as 16 hexadecimal digits."""
    return f"{value & (1 << 64) - 1:016x}"
