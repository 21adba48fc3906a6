"""A reduce-scatter that sends values in their own dtype and sums them on the receiver in float32, in rank order.

The engine uses the same exchange and sum; `reduce_scatter_with_fp32_accumulation` offers them to callers with buffers
of their own. A rank sends `(N - 1) / N` of its input, as in a ring; a ring of bfloat16 values rounds the sum at each
of its `N - 1` hops, this rounds it once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.comm.collectives import Axis, HostWork, sum_received
from megatron_fsdp.errors import CollectiveArgumentError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def reduce_scatter_with_fp32_accumulation(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 (the published name)
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    all_to_all_output_tensor: torch.Tensor | None = None,
) -> HostWork | None:
    """Reduce-scatter `input` with sums in float32: rank r gets part r, in memory order, in `output`. Collective.

    Arguments are checked before anything is sent, except for one thing that a rank cannot see: every rank has to give
    an input of the same size and dtype.

    Args:
        output: numel of `input` / ranks elements, any shape and floating dtype; may be a part of `input`. It holds the
            result when this returns, or with `async_op` after `wait`.
        input: Contiguous, any shape; float16, bfloat16, float32 or float64, which is how it travels. With `async_op` it
            has to stay as it is until `wait`.
        op: `ReduceOp.SUM` only.
        group: The ranks; None: all.
        async_op: Return at once.
        all_to_all_output_tensor: Contiguous memory of the shape and dtype of `input` for what other ranks send,
            overwritten; it shares no memory with `input` or `output`. None: allocated here.

    Returns:
        With `async_op` a handle whose `wait()` sums and fills `output`, once; else None.

    Raises:
        CollectiveArgumentError: An argument is not as described (a ConfigurationError and an AssertionError).
    """
    if not dist.is_initialized():
        raise CollectiveArgumentError(
            "reduce_scatter_with_fp32_accumulation needs ranks; call init_process_group first"
        )
    axis = Axis(group, dist.get_rank(group), dist.get_world_size(group))
    if axis.rank < 0:
        raise CollectiveArgumentError("this rank is not in the group of the reduce-scatter; call it on its ranks only")
    received = all_to_all_output_tensor
    _check(output, input, op, axis.num_ranks, received)
    target, full = output.detach(), input.detach().view(-1)
    received = torch.empty_like(full) if received is None else received.detach().view(-1)

    def finish() -> None:
        target.copy_(sum_received(received, axis.num_ranks).view(target.shape))

    work = HostWork(axis.exchange(received, full), finish) if full.numel() else HostWork(None, None)
    if async_op:
        return work
    work.wait()
    return None


def _check(output: torch.Tensor, full: torch.Tensor, op: Any, num_ranks: int, received: torch.Tensor | None) -> None:
    share = full.numel() // num_ranks
    problems = [
        (op != dist.ReduceOp.SUM, f"op is {op}; only SUM can be added up here, so scale before or after"),
        (
            full.dtype not in _DTYPES or not output.is_floating_point(),
            f"input is {full.dtype} and output {output.dtype}; give floating point, the input in 16, 32 or 64 bits",
        ),
        (not full.is_contiguous(), f"input has strides {full.stride()}; give it contiguous"),
        (
            full.numel() % num_ranks != 0,
            f"input has {full.numel()} elements, which {num_ranks} ranks cannot share out; pad it to a multiple",
        ),
        (
            output.numel() * num_ranks != full.numel(),
            f"output has {output.numel()} elements; {num_ranks} ranks that share {full.numel()} get {share} each",
        ),
        (output.device != full.device, f"output is on {output.device} and input on {full.device}; give both on one"),
    ]
    if received is not None:
        found = (received.shape, received.dtype, received.device)
        problems += [
            (
                found != (full.shape, full.dtype, full.device) or not received.is_contiguous(),
                f"all_to_all_output_tensor is {_told(received)}; give {_told(full)}, contiguous, or leave it out",
            ),
            (
                _share_memory(received, full) or _share_memory(received, output),
                "all_to_all_output_tensor shares memory with input or output; give memory of its own, or leave it out",
            ),
        ]
    for is_wrong, what in problems:
        if is_wrong:
            raise CollectiveArgumentError(f"reduce_scatter_with_fp32_accumulation: {what}")


def _told(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _share_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if the memory ranges of two tensors overlap."""
    (first, stop), (other_first, other_stop) = _stretch(left), _stretch(right)
    return first < other_stop and other_first < stop


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
