"""Collectives, bytes, copies and their moments under buckets, exactly, seen below the library."""

import itertools
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from megatron_fsdp.config.strategy import ShardingStrategy
from tests.conftest import RunRanks
from tests.support.counting import ALL_REDUCE, EXCHANGE, GATHER, Collectives, OpCounts
from tests.support.formulas import footprints_of, step_traffic
from tests.support.on_ranks import engine_of, on_ranks
from tests.support.zoo import MODEL_CASES

Fields = dict[str, Any]

WIDTHS = (8, 16, 24, 32, 40)
NUMELS = [before * after for before, after in itertools.pairwise(WIDTHS)]
"""Parameters of four linear layers without biases: buckets can be told apart by what they send."""

EACH_LAYER: Fields = {"bucket_size": 1, "overlap_grad_reduce": True}
SHARDS: Fields = {**EACH_LAYER, "use_distributed_optimizer": True}


Log = list[str]
"""What happened, in order: `reduce3`, `gather1`, `forward2`, `backward4`, by bucket and layer from 1."""


class Mark(torch.autograd.Function):
    """Identity; notes when the gradient comes back through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: Log, line: str) -> Tensor:
        ctx.log, ctx.line = log, line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(ctx.line)
        return grads[0], None, None


class Steps(nn.Module):
    """Layers that note when their backward has gone past them; one of them may be skipped."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        pairs = itertools.pairwise(WIDTHS)
        self.layers = nn.ModuleList(nn.Linear(before, after, bias=False) for before, after in pairs)
        self.log = log
        self.skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for number, layer in enumerate(self.layers, start=1):
            if number == self.skipped:
                x = x.repeat(1, 2)[:, : WIDTHS[number]]
            else:
                x = layer(Mark.apply(x, self.log, f"backward{number}"))  # type: ignore[no-untyped-call]
        return x


class Wire(TorchDispatchMode):
    """Notes collectives by the bucket whose size they have."""

    def __init__(self, log: Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("c10d::allreduce_", "c10d::alltoall_base_", "c10d::_allgather_base_"):
            sent = args[0][0] if name == "c10d::allreduce_" else args[0]
            if sent.numel() in NUMELS:
                kind = "gather" if "gather" in name else "reduce"
                self.log.append(f"{kind}{NUMELS.index(sent.numel()) + 1}")
        return func(*args, **(kwargs or {}))


def wrap(fields: Fields, module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(DistributedDataParallelConfig(**fields), module or Steps([]), **options)


def steps(fields: Fields, skip: dict[int, dict[int, int]] | None = None, count: int = 3) -> list[str]:
    """What happens in each step; `skip[step][rank]` is the layer that a rank skips."""
    log: Log = []
    torch.manual_seed(0)
    model = wrap(fields, Steps(log))
    for number, layer in enumerate(model.module.layers, start=1):  # type: ignore[arg-type]
        layer.register_forward_pre_hook(lambda *_, number=number: log.append(f"forward{number}"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(count):
        model.module.skipped = (skip or {}).get(step, {}).get(dist.get_rank())  # type: ignore[assignment]
        log.clear()
        with Wire(log):
            model(torch.ones(2, WIDTHS[0])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(" ".join(log))
    return found


FORWARD = "forward1 forward2 forward3 forward4"
ALL_BACK = "backward4 backward3 backward2 backward1"
ALL_REDUCED = "reduce4 reduce3 reduce2 reduce1"
EARLY = "reduce4 backward4 reduce3 backward3 reduce2 backward2 reduce1 backward1"
ALL_GATHERED = "gather1 gather2 gather3 gather4"


def test_a_bucket_is_reduced_as_soon_as_it_is_complete_from_the_second_backward_on(run_ranks: RunRanks) -> None:
    """Before the backward of the layer in front of it runs."""
    for first, second, third in run_ranks(2, steps, EACH_LAYER):
        assert first == f"{FORWARD} {ALL_BACK} {ALL_REDUCED}"
        assert second == third == f"{FORWARD} {EARLY}"


def test_without_overlap_everything_is_reduced_when_backward_is_over(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, steps, {"bucket_size": 1}):
        assert found == [f"{FORWARD} {ALL_BACK} {ALL_REDUCED}"] * 3


def test_a_layer_that_one_rank_skips_changes_no_order(run_ranks: RunRanks) -> None:
    """Rank 1 skips a layer in step 1, whose bucket and those in front of it wait for the end of its backward."""
    whole, partly = run_ranks(2, steps, EACH_LAYER, {1: {1: 3}})
    assert whole[1] == f"{FORWARD} {EARLY}"
    assert partly[1] == ("forward1 forward2 forward4 reduce4 backward4 backward2 backward1 reduce3 reduce2 reduce1")
    for found in (whole, partly):
        assert [line for line in found[1].split() if line.startswith("reduce")] == ALL_REDUCED.split()
        assert found[2] == f"{FORWARD} {EARLY}"


@pytest.mark.parametrize("more", [{}, {"overlap_param_gather": True, "align_param_gather": True}])
def test_without_overlap_or_aligned_all_gathers_start_before_the_first_module(
    run_ranks: RunRanks, more: Fields
) -> None:
    for found in run_ranks(2, steps, {**SHARDS, **more}):
        assert found[1:] == [f"{ALL_GATHERED} {FORWARD} {EARLY}"] * 2


def test_overlapped_gathers_are_started_one_bucket_ahead(run_ranks: RunRanks) -> None:
    in_turn = "gather1 gather2 forward1 gather3 forward2 gather4 forward3 forward4"
    for found in run_ranks(2, steps, {**SHARDS, "overlap_param_gather": True}):
        assert found[0].startswith(f"{ALL_GATHERED} {FORWARD} ")  # who reads what is not known yet
        assert found[1:] == [f"{in_turn} {EARLY}"] * 2


def test_a_rank_that_skips_a_layer_gathers_its_bucket_in_turn_all_the_same(run_ranks: RunRanks) -> None:
    fields = {**SHARDS, "overlap_param_gather": True}
    for found in run_ranks(2, steps, fields, {1: {0: 2, 1: 4}, 2: {1: 1}}, 4):
        for lines in found:
            assert [line for line in lines.split() if line.startswith("gather")] == ALL_GATHERED.split()
            assert [line for line in lines.split() if line.startswith("reduce")] == ALL_REDUCED.split()


# ---- counts and bytes ------------------------------------------------------------------------------------------------


def count(name: str, fields: Fields, microbatches: int) -> tuple[list[Any], Collectives, Any, int]:
    """Footprints, what a steady step sends, what the model counted of it, and the number of buckets."""
    case = MODEL_CASES[name]  # type: ignore[index]
    torch.manual_seed(0)
    model = wrap(fields, case.build())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    batch = case.make_batch(2, torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        before = model.traffic()
        with OpCounts() as counts:
            for microbatch in range(microbatches):
                with model.no_sync() if microbatch < microbatches - 1 else nullcontext():
                    case.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    buckets = sum(unit.is_trainable for unit in engine_of(model).units)
    return list(footprints_of(model)), counts.collectives, model.traffic().since(before), buckets


@pytest.mark.full(short=["1-scalars-2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", ["transformer", "scalars", "partly_frozen"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_step_sends_each_bucket_once_however_many_microbatches(
    run_ranks: RunRanks, name: str, num_ranks: int, microbatches: int
) -> None:
    """An all-reduce for each bucket; or a reduce-scatter and a gather for each."""
    size = 900 if name != "scalars" else 40
    for shards in (False, True):
        fields = {"bucket_size": size, "use_distributed_optimizer": shards, "overlap_grad_reduce": True}
        for groups, seen, counted, buckets in run_ranks(num_ranks, count, name, fields, microbatches):
            trained = [group for group in groups if group.requires_grad]
            cut = [group for group in trained if not group.is_whole] if shards else []
            assert buckets == len(trained) >= 4
            whole_bytes = sum(group.numel * group.grad_comm.itemsize for group in trained if group not in cut)
            cut_bytes = sum(group.numel * group.grad_comm.itemsize for group in cut)
            assert seen == Collectives(
                gathers=len(cut),
                reductions=buckets,
                gather_bytes=cut_bytes - cut_bytes // num_ranks,
                reduce_bytes=cut_bytes - cut_bytes // num_ranks + 2 * whole_bytes - _shares(trained, cut, num_ranks),
            )
            assert asdict(counted) == {key: value for key, value in asdict(seen).items() if key != "others"}
            expected = step_traffic(groups, ShardingStrategy(int(shards)))
            assert asdict(counted) == asdict(expected)


def _shares(trained: list[Any], cut: list[Any], num_ranks: int) -> int:
    """Twice a rank's own share of what is all-reduced, rounded down for each."""
    return sum(2 * (group.numel * group.grad_comm.itemsize // num_ranks) for group in trained if group not in cut)


@on_ranks(4)
def test_two_instances_send_a_share_of_each_bucket_across_as_well() -> None:
    model = wrap({**SHARDS, "num_distributed_optimizer_instances": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        with OpCounts() as counts:
            model(torch.ones(2, WIDTHS[0])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    outer, inner = (axis.group for axis in model.parameter_groups()[-1].plan.axes)
    assert [group.numel for group in footprints_of(model)] == NUMELS
    half = sum(NUMELS) * 4 // 2
    assert counts.on(inner, GATHER) == counts.on(inner, EXCHANGE) == (4, half)
    assert counts.on(inner) == (8, 2 * half)
    assert counts.on(outer, ALL_REDUCE) == counts.on(outer) == (4, half)  # 2 * (1 - 1/2) of a half


# ---- copies ----------------------------------------------------------------------------------------------------------


def extra_operators(fields: Fields) -> dict[str, int]:
    """Operators of a steady forward and backward beyond those of the plain model."""
    model = wrap(fields)
    for _ in range(3):
        model.zero_grad()
        with OpCounts() as wrapped:
            model(torch.ones(2, WIDTHS[0])).sum().backward()
    plain = Steps([])
    for param in plain.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with OpCounts() as alone:
        plain(torch.ones(2, WIDTHS[0])).sum().backward()
    extra = Counter(wrapped.ops)
    extra.subtract(alone.ops)
    return {op: times for op, times in extra.items() if times}


def test_each_gradient_is_copied_once(run_ranks: RunRanks) -> None:
    """Two layers a bucket. Scaling first takes the place of the copy; what is then left of the factor is 1."""
    two = {"bucket_size": NUMELS[3] + 1, "overlap_grad_reduce": True}
    for shards, copied, scaled in (
        (False, {"copy_": 4, "mul.out": 2}, {"mul.out": 4 + 2}),
        (True, {"copy_": 4, "add.out": 2, "mul_.Tensor": 2}, {"mul.out": 4, "add.out": 2}),
    ):
        fields = {**two, "use_distributed_optimizer": shards}
        assert run_ranks(2, extra_operators, fields) == [copied] * 2
        first = {**fields, "gradient_reduce_div_fusion": False}
        assert run_ranks(2, extra_operators, first) == [scaled] * 2


# ---- buckets ---------------------------------------------------------------------------------------------------------


def buckets_of(fields: Fields, disable_bucketing: bool = False) -> tuple[list[int], int | None, list[tuple[str, ...]]]:
    model = wrap(fields, disable_bucketing=disable_bucketing)
    names = [group.names for group in model.parameter_groups()]
    return [group.numel for group in footprints_of(model)], model.bucket_size, names


@pytest.mark.parametrize(
    ("fields", "numels", "size"),
    [
        ({"bucket_size": 1}, NUMELS, 1),
        ({"bucket_size": NUMELS[3]}, [sum(NUMELS[:3]), NUMELS[3]], NUMELS[3]),
        ({"bucket_size": NUMELS[3] + 1}, [sum(NUMELS[:2]), sum(NUMELS[2:])], NUMELS[3] + 1),
        ({"num_buckets": 2}, [sum(NUMELS[:3]), NUMELS[3]], sum(NUMELS) // 2),
        ({"num_buckets": 4}, [sum(NUMELS[:2]), NUMELS[2], NUMELS[3]], sum(NUMELS) // 4),
        ({}, [sum(NUMELS)], None),
        ({"overlap_grad_reduce": True}, [sum(NUMELS)], 40_000_000),
    ],
)
def test_sizes_of_buckets(run_ranks: RunRanks, fields: Fields, numels: list[int], size: int | None) -> None:
    for found, told, names in run_ranks(2, buckets_of, fields):
        assert found == numels
        assert told == size
        assert [name for bucket in names for name in bucket] == [f"layers.{i}.weight" for i in range(4)]


@pytest.mark.parametrize("shards", [False, True])
def test_padded_buckets_are_multiples_of_two_to_the_sixteenth(run_ranks: RunRanks, shards: bool) -> None:
    for found, told, _ in run_ranks(2, buckets_of, {"overlap_grad_reduce": True}, True):
        assert (found, told) == ([sum(NUMELS)], None)  # bucketing is disabled
    fields = {"use_distributed_optimizer": shards, "pad_buckets_for_high_nccl_busbw": True, "bucket_size": 1_000}
    for num_ranks in (2, 3):
        for found, _, _ in run_ranks(num_ranks, buckets_of, fields):
            assert len(found) == 3
            assert all(numel % 2**16 == 0 and (not shards or numel % num_ranks == 0) for numel in found)
            assert all(numel <= 2**16 * num_ranks for numel in found)
