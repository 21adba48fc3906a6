"""The public reduce-scatter: exact values on 1 to 4 ranks, in place, in the background, and what it refuses."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp import reduce_scatter_with_fp32_accumulation
from megatron_fsdp.errors import CollectiveArgumentError, ConfigurationError
from tests.support.counting import OpCounts
from tests.support.on_ranks import on_ranks, same_on_ranks

SHARD = 500  # elements per rank


def contribution(rank: int, num_ranks: int, dtype: torch.dtype) -> Tensor:
    """Sixteenths up to 16: every sum is exact in float32 and few are in bfloat16. (num_ranks * SHARD,)."""
    generator = torch.Generator().manual_seed(rank)
    return (torch.randint(-256, 257, (num_ranks * SHARD,), generator=generator) / 16).to(dtype)


def exact(rank: int, num_ranks: int) -> Tensor:
    """Of one rank's part, in float64."""
    everyone = [contribution(other, num_ranks, torch.float64) for other in range(num_ranks)]
    return torch.stack(everyone).sum(0)[rank * SHARD : (rank + 1) * SHARD]


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "out_dtype", "how"),
    [
        (2, torch.bfloat16, torch.bfloat16, "plain"),
        (3, torch.bfloat16, torch.bfloat16, "in place"),
        (4, torch.bfloat16, torch.float32, "own memory"),
        (4, torch.float16, torch.bfloat16, "plain"),
        (1, torch.float32, torch.float32, "in place"),
        (3, torch.float64, torch.float64, "own memory"),
    ],
)
@on_ranks()
def test_the_sum_is_exact_rounded_once_and_sent_as_in_a_ring(
    num_ranks: int, dtype: torch.dtype, out_dtype: torch.dtype, how: str
) -> None:
    rank = dist.get_rank()
    full = contribution(rank, num_ranks, dtype).view(num_ranks * 5, -1)
    before = full.clone()
    output = torch.full((SHARD // 4, 4), -1.0, dtype=out_dtype)
    if how == "in place":
        output = full.view(-1)[rank * SHARD : (rank + 1) * SHARD]
    scratch = torch.zeros_like(full) if how == "own memory" else None
    with OpCounts() as counted:
        assert reduce_scatter_with_fp32_accumulation(output, full, all_to_all_output_tensor=scratch) is None
    assert how == "in place" or torch.equal(full, before)
    assert torch.equal(output.reshape(-1), exact(rank, num_ranks).to(out_dtype))
    sent = counted.collectives
    assert (sent.reductions, sent.others) == (1, [])
    assert sent.reduce_bytes == (num_ranks - 1) * SHARD * dtype.itemsize


@pytest.mark.parametrize("num_ranks", [1, 3])
@on_ranks()
def test_in_the_background_the_output_is_filled_by_the_first_wait(num_ranks: int) -> None:
    """Of three reductions, of which the last one is waited for first."""
    rank, group = dist.get_rank(), dist.new_group(list(range(num_ranks)))
    inputs = [contribution(rank, num_ranks, torch.bfloat16) * factor for factor in (1, 2, 4)]
    outputs = [torch.full((SHARD,), -1.0, dtype=torch.bfloat16) for _ in inputs]
    handles = [
        reduce_scatter_with_fp32_accumulation(output, full, dist.ReduceOp.SUM, group, async_op=True)
        for output, full in zip(outputs, inputs, strict=True)
    ]
    assert all((output == -1.0).all() for output in outputs)
    for handle in reversed(handles):
        assert handle is not None
        handle.wait()
    for output, factor in zip(outputs, (1, 2, 4), strict=True):
        assert torch.equal(output, (exact(rank, num_ranks) * factor).to(torch.bfloat16))
    outputs[0].fill_(7.0)
    assert handles[0] is not None
    handles[0].wait()
    dist.destroy_process_group(group)
    assert (outputs[0] == 7.0).all()


@on_ranks(3)
def test_a_group_of_some_ranks_reduces_among_them() -> None:
    """Ranks 0 and 2 reduce among them; rank 1 is told that it is none of them. Nothing at all is fine, too."""
    group, rank = dist.new_group([0, 2]), dist.get_rank()
    full = contribution(rank // 2, 2, torch.bfloat16)
    output = full.new_zeros(SHARD)
    words = "^this rank is not in the group of the reduce-scatter; call it on its ranks only$"
    with pytest.raises(CollectiveArgumentError, match=words) if rank == 1 else nullcontext():
        reduce_scatter_with_fp32_accumulation(output, full, group=group)
    reduce_scatter_with_fp32_accumulation(full[:0], full[:0])
    if rank != 1:
        dist.destroy_process_group(group)
        assert torch.equal(output, exact(rank // 2, 2).to(torch.bfloat16))


# ---- what is refused -------------------------------------------------------------------------------------------------

BF16 = torch.bfloat16
FULL = torch.zeros(2, 6, dtype=BF16)

REFUSALS: dict[str, tuple[tuple[Tensor, Tensor], dict[str, Any], str]] = {
    "op": ((FULL[0], FULL), {"op": dist.ReduceOp.MAX}, "op is RedOpType.MAX; only SUM can be added up here"),
    "average": ((FULL[0], FULL), {"op": dist.ReduceOp.AVG}, "so scale before or after"),
    "integers": (
        (FULL[0], FULL.int()),
        {},
        "input is torch.int32 and output torch.bfloat16; give floating point, the input in 16, 32",
    ),
    "integer output": (
        (FULL[0].int(), FULL),
        {},
        "input is torch.bfloat16 and output torch.int32; give floating point",
    ),
    "strides": ((FULL[0], FULL.t()), {}, "input has strides (1, 6); give it contiguous"),
    "uneven": ((FULL[0], torch.zeros(13, dtype=BF16)), {}, "input has 13 elements, which 2 ranks cannot share out"),
    "output size": ((FULL[0, :5], FULL), {}, "output has 5 elements; 2 ranks that share 12 get 6 each"),
    "scratch shape": (
        (FULL[0], FULL),
        {"all_to_all_output_tensor": torch.zeros(12, dtype=BF16)},
        "all_to_all_output_tensor is torch.bfloat16 (12,) on cpu; give torch.bfloat16 (2, 6) on cpu, contiguous",
    ),
    "scratch dtype": (
        (FULL[0], FULL),
        {"all_to_all_output_tensor": torch.zeros(2, 6)},
        "all_to_all_output_tensor is torch.float32 (2, 6) on cpu; give torch.bfloat16",
    ),
    "scratch in use": ((FULL[0], FULL), {"all_to_all_output_tensor": FULL}, "shares memory with input or output"),
}


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_every_rank_before_anything_is_sent() -> None:
    said = []
    with OpCounts() as counted:
        for (output, full), more, _ in REFUSALS.values():
            with pytest.raises(CollectiveArgumentError) as caught:
                reduce_scatter_with_fp32_accumulation(output, full, **more)
            assert isinstance(caught.value, AssertionError)
            assert isinstance(caught.value, ConfigurationError)
            said.append(str(caught.value))
    output = torch.zeros(6)
    reduce_scatter_with_fp32_accumulation(output, torch.ones(12))
    assert output.tolist() == [2.0] * 6
    first = same_on_ranks((said, counted.collectives.reductions + len(counted.collectives.others)))
    said, collectives = first
    assert collectives == 0
    for (name, (_, _, expected)), message in zip(REFUSALS.items(), said, strict=True):
        assert message.startswith("reduce_scatter_with_fp32_accumulation: "), name
        assert expected in message, name


def test_without_ranks_it_says_so() -> None:
    with pytest.raises(CollectiveArgumentError, match="needs ranks; call init_process_group first"):
        reduce_scatter_with_fp32_accumulation(torch.zeros(1), torch.zeros(1))
