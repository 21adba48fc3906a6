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

from megatron_fsdp.config.ddp_config import ShardingStrategy
from tests.support.counting import ALL_REDUCE, EXCHANGE, GATHER, Collectives, OpCounts, own_part
from tests.support.doors import in_buckets
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


class Steps(nn.Module):
    """Layers that note when their backward has gone past them."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        pairs = itertools.pairwise(WIDTHS)
        self.layers = nn.ModuleList(nn.Linear(before, after, bias=False) for before, after in pairs)
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for number, layer in enumerate(self.layers, start=1):
            x = x.view_as(x)
            x.register_hook(lambda _grad, number=number: self.log.append(f"backward{number}"))  # type: ignore[misc]
            x = layer(x)
        return x


class Wire(TorchDispatchMode):
    """Notes collectives by the bucket whose size they have."""

    def __init__(self, log: Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        numel, kind = None, "reduce"
        if name == "c10d::broadcast_" and (part := own_part(args)) is not None:
            numel, kind = part.numel() * dist.get_world_size(), "gather"
        elif name == "c10d::allreduce_":
            numel = args[0][0].numel()
        elif name == "c10d::alltoall_base_":
            numel = args[0].numel() * (2 if args[3] else 1)  # with sizes it brings the other rank's half alone
        if numel in NUMELS:
            self.log.append(f"{kind}{NUMELS.index(numel) + 1}")
        return func(*args, **(kwargs or {}))


FORWARD = "forward1 forward2 forward3 forward4"
ALL_GATHERED = "gather1 gather2 gather3 gather4"
IN_TURN = "gather1 gather2 forward1 gather3 forward2 gather4 forward3 forward4"
ALL_REDUCED = "backward4 backward3 backward2 backward1 reduce4 reduce3 reduce2 reduce1"
EARLY = "reduce4 backward4 reduce3 backward3 reduce2 backward2 reduce1 backward1"
OVERLAPPED: Fields = {**SHARDS, "overlap_param_gather": True}
MOMENTS: dict[str, tuple[Fields, str, str]] = {  # the first step, and the second and third
    "from the second backward on as soon as a bucket is complete": (
        EACH_LAYER,
        f"{FORWARD} {ALL_REDUCED}",
        f"{FORWARD} {EARLY}",
    ),
    "without overlap when backward is over": (
        {"bucket_size": 1},
        f"{FORWARD} {ALL_REDUCED}",
        f"{FORWARD} {ALL_REDUCED}",
    ),
    "gathers before the first module": (
        SHARDS,
        f"{ALL_GATHERED} {FORWARD} {ALL_REDUCED}",
        f"{ALL_GATHERED} {FORWARD} {EARLY}",
    ),
    "aligned gathers too": (
        {**OVERLAPPED, "align_param_gather": True},
        f"{ALL_GATHERED} {FORWARD} {ALL_REDUCED}",
        f"{ALL_GATHERED} {FORWARD} {EARLY}",
    ),
    "overlapped gathers one bucket ahead, once it is known who reads what": (
        OVERLAPPED,
        f"{ALL_GATHERED} {FORWARD} {ALL_REDUCED}",
        f"{IN_TURN} {EARLY}",
    ),
}


@pytest.mark.parametrize("name", MOMENTS)
@on_ranks(2)
def test_collectives_start(name: str) -> None:
    fields, first, later = MOMENTS[name]
    log: Log = []
    model = in_buckets(Steps(log), fields)
    for number, layer in enumerate(model.module.layers, start=1):  # type: ignore[arg-type]
        layer.register_forward_pre_hook(lambda *_, number=number: log.append(f"forward{number}"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for expected in (first, later, later):
        log.clear()
        with Wire(log):
            model(torch.ones(2, WIDTHS[0])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert " ".join(log) == expected


# ---- counts and bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "microbatches", "name", "num_ranks"),
    [(False, 1, "scalars", 2), (True, 3, "transformer", 2), (False, 3, "partly_frozen", 3), (True, 1, "scalars", 3)],
)
@on_ranks()
def test_a_step_sends_each_bucket_once_however_many_microbatches(
    name: str, num_ranks: int, microbatches: int, shards: bool
) -> None:
    """An all-reduce for each bucket; or a reduce-scatter and a gather for each."""
    case, size = MODEL_CASES[name], 900 if name != "scalars" else 40
    torch.manual_seed(0)
    fields = {"bucket_size": size, "use_distributed_optimizer": shards, "overlap_grad_reduce": True}
    model = in_buckets(case.build(), fields)
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
    groups, seen, counted = footprints_of(model), counts.collectives, model.traffic().since(before)
    trained = [group for group in groups if group.requires_grad]
    cut = [group for group in trained if not group.is_whole] if shards else []
    assert sum(unit.is_trainable for unit in engine_of(model).units) == len(trained) >= 4
    whole_bytes = sum(group.numel * group.grad_comm.itemsize for group in trained if group not in cut)
    cut_bytes = sum(group.numel * group.grad_comm.itemsize for group in cut)
    assert seen == Collectives(
        gathers=len(cut),
        reductions=len(trained),
        gather_bytes=cut_bytes - cut_bytes // num_ranks,
        reduce_bytes=cut_bytes - cut_bytes // num_ranks + 2 * whole_bytes - _shares(trained, cut, num_ranks),
    )
    assert asdict(counted) == {key: value for key, value in asdict(seen).items() if key != "others"}
    assert asdict(counted) == asdict(step_traffic(groups, ShardingStrategy(int(shards))))


def _shares(trained: list[Any], cut: list[Any], num_ranks: int) -> int:
    """Twice a rank's own share of what is all-reduced, rounded down for each."""
    return sum(2 * (group.numel * group.grad_comm.itemsize // num_ranks) for group in trained if group not in cut)


@on_ranks(4)
def test_two_instances_send_a_share_of_each_bucket_across_as_well() -> None:
    model = in_buckets(Steps([]), {**SHARDS, "num_distributed_optimizer_instances": 2})
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


def extra_operators(fields: Fields) -> dict[str, int]:
    """Operators of a steady forward and backward beyond those of the plain model."""
    model = in_buckets(Steps([]), fields)
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


@on_ranks(2)
def test_each_gradient_is_copied_once() -> None:
    """Two layers a bucket. Scaling first replaces the copy, as it does in any case where ranks keep whole gradients."""
    two = {"bucket_size": NUMELS[3] + 1, "overlap_grad_reduce": True}
    for shards, copied, scaled in (
        (False, {"mul.out": 4}, {"mul.out": 4}),
        (True, {"copy_": 4, "add.out": 2, "mul_.Tensor": 2}, {"mul.out": 4, "add.out": 2}),
    ):
        fields = {**two, "use_distributed_optimizer": shards}
        assert extra_operators(fields) == copied
        assert extra_operators({**fields, "gradient_reduce_div_fusion": False}) == scaled


@pytest.mark.parametrize(("shards", "num_ranks"), [(False, 3), (True, 3)])
@on_ranks()
def test_padded_buckets_are_multiples_of_two_to_the_sixteenth(shards: bool, num_ranks: int) -> None:
    whole = in_buckets(Steps([]), {"overlap_grad_reduce": True}, disable_bucketing=True)
    assert ([group.numel for group in footprints_of(whole)], whole.bucket_size) == ([sum(NUMELS)], None)
    fields = {"use_distributed_optimizer": shards, "pad_buckets_for_high_nccl_busbw": True, "bucket_size": 1_000}
    padded = [group.numel for group in footprints_of(in_buckets(Steps([]), fields))]
    assert len(padded) == 3
    assert all(numel % 2**16 == 0 and (not shards or numel % num_ranks == 0) for numel in padded)
    assert all(numel <= 2**16 * num_ranks for numel in padded)
