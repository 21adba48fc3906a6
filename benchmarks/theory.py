"""What a contender has to send per step and rank, from its algorithm alone (pure)."""

from __future__ import annotations

from benchmarks.contenders import DDP, DDP_VIEW, DDP_ZERO, FLOORS, OUR_DDP, OUR_DDP_OPTIM, OURS
from benchmarks.readings import Request, RunReading

_ITEMSIZE = {"float32": 4, "bfloat16": 2}


def needed_bytes(name: str, request: Request, reading: RunReading) -> int | None:
    """Bytes that one rank sends in a step over a ring, the mean of all ranks; flags and padding are left out.

    A reduce-scatter, a gather, and broadcasts of every rank's part to all others send `(N - 1) / N` of the whole each,
    an all-reduce twice that.

    Args:
        name: A contender.
        request: For ranks, dtype and microbatches.
        reading: For the size of the model.

    Returns:
        None where it depends on what stays gathered.
    """
    parts = dict.fromkeys(FLOORS, (0, 0))  # of gradients, and of weights
    parts |= dict.fromkeys((OURS[0], OUR_DDP, DDP, DDP_VIEW), (2, 0))  # an all-reduce
    parts |= dict.fromkeys((OURS[1], OUR_DDP_OPTIM), (1, 1))  # a reduce-scatter and a gather
    parts[DDP_ZERO] = (2, 1)  # an all-reduce, and broadcasts
    parts[OURS[2]] = (request.microbatches, 1)  # a reduce-scatter after each microbatch, and a gather
    if name not in parts:
        return None
    of_gradients, of_weights = (
        count * _all_but_own(reading.parameter_numel * _ITEMSIZE[dtype], request.ranks)
        for count, dtype in zip(parts[name], (request.comm_dtype, request.dtype), strict=True)
    )
    return of_gradients + of_weights


def _all_but_own(whole_bytes: int, ranks: int) -> int:
    return whole_bytes - whole_bytes // ranks
