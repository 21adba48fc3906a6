"""The public reduce-scatter: exact values on 1 to 4 ranks, in place, in the background, and what it refuses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp import reduce_scatter_with_fp32_accumulation
from megatron_fsdp.errors import CollectiveArgumentError, ConfigurationError
from tests.conftest import RunRanks
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


def reduce(dtype: torch.dtype, out_dtype: torch.dtype, how: str) -> tuple[Tensor, Any, tuple[int, int, list[str]]]:
    """The result, what the call returned, and what was sent."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    full = contribution(rank, num_ranks, dtype).view(num_ranks * 5, -1)
    before = full.clone()
    output = torch.full((SHARD // 4, 4), -1.0, dtype=out_dtype)
    if how == "in place":
        output = full.view(-1)[rank * SHARD : (rank + 1) * SHARD]
    scratch = torch.zeros_like(full) if how == "own memory" else None
    with OpCounts() as counted:
        returned = reduce_scatter_with_fp32_accumulation(output, full, all_to_all_output_tensor=scratch)
    if how != "in place":
        assert torch.equal(full, before)
    sent = counted.collectives
    return output.reshape(-1), returned, (sent.reductions, sent.reduce_bytes, sent.others)


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
def test_the_sum_is_exact_rounded_once_and_sent_as_in_a_ring(
    run_ranks: RunRanks, num_ranks: int, dtype: torch.dtype, out_dtype: torch.dtype, how: str
) -> None:
    for rank, (result, returned, sent) in enumerate(run_ranks(num_ranks, reduce, dtype, out_dtype, how)):
        assert returned is None
        assert torch.equal(result, exact(rank, num_ranks).to(out_dtype))
        assert sent == (1, (num_ranks - 1) * SHARD * dtype.itemsize, [])


def in_background() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs of three reductions before any wait, after all (the last one first), and after waiting again."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(num_ranks)))
    inputs = [contribution(rank, num_ranks, torch.bfloat16) * factor for factor in (1, 2, 4)]
    outputs = [torch.full((SHARD,), -1.0, dtype=torch.bfloat16) for _ in inputs]
    handles = [
        reduce_scatter_with_fp32_accumulation(output, full, dist.ReduceOp.SUM, group, async_op=True)
        for output, full in zip(outputs, inputs, strict=True)
    ]
    before = [output.clone() for output in outputs]
    for handle in reversed(handles):
        assert handle is not None
        handle.wait()
    after = [output.clone() for output in outputs]
    outputs[0].fill_(7.0)
    assert handles[0] is not None
    handles[0].wait()
    dist.destroy_process_group(group)
    return before, after, outputs[0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_in_the_background_the_output_is_filled_by_the_first_wait(run_ranks: RunRanks, num_ranks: int) -> None:
    for rank, (before, after, again) in enumerate(run_ranks(num_ranks, in_background)):
        assert all(torch.equal(output, torch.full((SHARD,), -1.0, dtype=torch.bfloat16)) for output in before)
        for output, factor in zip(after, (1, 2, 4), strict=True):
            assert torch.equal(output, (exact(rank, num_ranks) * factor).to(torch.bfloat16))
        assert torch.equal(again, torch.full((SHARD,), 7.0, dtype=torch.bfloat16))


def on_part_of_the_ranks() -> tuple[Tensor | None, str]:
    """Ranks 0 and 2 reduce among them; rank 1 is told that it is none of them. Nothing at all is fine, too."""
    group = dist.new_group([0, 2])
    full = contribution(dist.get_rank() // 2, 2, torch.bfloat16)
    output, said = full.new_zeros(SHARD), ""
    try:
        reduce_scatter_with_fp32_accumulation(output, full, group=group)
    except CollectiveArgumentError as error:
        said = str(error)
    reduce_scatter_with_fp32_accumulation(full[:0], full[:0])
    if dist.get_rank() != 1:
        dist.destroy_process_group(group)
    return (output if not said else None), said


def test_a_group_of_some_ranks_reduces_among_them(run_ranks: RunRanks) -> None:
    (first, _), (none, said), (last, _) = run_ranks(3, on_part_of_the_ranks)
    assert torch.equal(first, exact(0, 2).to(torch.bfloat16))
    assert torch.equal(last, exact(1, 2).to(torch.bfloat16))
    assert none is None
    assert said == "this rank is not in the group of the reduce-scatter; call it on its ranks only"


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
