"""Collectives, bytes, copies and allocations of whole steps on real ranks, counted below the library."""

from collections import Counter
from dataclasses import asdict
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.config.ddp_config import ShardingStrategy
from tests.conftest import RunRanks
from tests.support.case import adamw_above_noise, decayed_adamw, shard
from tests.support.counting import OpCounts
from tests.support.formulas import footprints_of, step_traffic
from tests.support.on_ranks import on_ranks
from tests.support.zoo import FLOOR_NUMEL, FLOORS, MODEL_CASES, ROOT_NUMEL, ModelName, tower_case, tower_loss

pytestmark = pytest.mark.unmerged

STEPS = 3


@pytest.mark.full(short=["transformer-2-0-3", "partly_frozen-2-3-3", "tied-3-1-1", "bf16_fp32_norm-2-1-3"])
@pytest.mark.parametrize(
    ("name", "num_ranks", "strategy", "microbatches"),
    [
        *(("transformer", 2, strategy, 3) for strategy in range(4)),
        ("transformer", 4, 3, 1),
        ("transformer", 1, 3, 3),
        ("partly_frozen", 2, 3, 3),
        ("tied", 3, 1, 1),
        ("bf16_fp32_norm", 2, 1, 3),
        ("scalars", 2, 3, 3),
    ],
)
@on_ranks()
def test_a_steady_step_sends_what_the_formula_says_and_takes_no_new_memory(
    name: ModelName, num_ranks: int, strategy: int, microbatches: int
) -> None:
    """The first step only adds one agreement on what was used; one rank sends nothing."""
    case = MODEL_CASES[name]
    model, optimizer = shard(case, decayed_adamw, zero_dp_strategy=strategy)
    expected = asdict(step_traffic(footprints_of(model), ShardingStrategy(strategy), microbatches))
    assert num_ranks > 1 or not any(expected.values())
    batch = case.make_batch(2, torch.Generator().manual_seed(dist.get_rank()))
    memory = []
    for step in range(STEPS):
        before = model.traffic()
        with OpCounts() as counts:
            for _ in range(microbatches):
                case.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert asdict(model.traffic().since(before)) == expected
        if step == 0:
            assert counts.collectives.reductions - expected["reductions"] == (num_ranks > 1)
        else:
            assert asdict(counts.collectives) == {**expected, "others": []}
        # gathered weights of strategy 3 are freed before the optimizer steps
        lasting = model.raw_param.values() if strategy < 3 else ()
        memory.append((model.memory().transient_peak_bytes, [param.data_ptr() for param in lasting]))
    assert memory == [memory[0]] * STEPS


# ---- copies -----------------------------------------------------------------------------------------------------


class Extra(NamedTuple):
    """What sharding adds to forward and backward in a steady step."""

    ops: dict[str, int]  # how often operators run more often than unsharded; none less often
    numels: dict[str, list[int]]  # for each of them, the elements of the first tensor of each sharded call
    install_ops: dict[str, int]  # on one rank's shards after the optimizer step


def count_extra(strategy: int, microbatches: int, bf16: bool) -> Extra:
    dtype = torch.bfloat16 if bf16 else torch.float32
    case = tower_case(dtype=dtype)
    x = torch.randn(2, 16, dtype=dtype)
    model, optimizer = shard(case, adamw_above_noise, zero_dp_strategy=strategy)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with OpCounts() as sharded:
            _backward(model, x, microbatches)
        optimizer.step()
    for param in model.parameters():
        with torch.no_grad():
            param.add_(1.0)
    with OpCounts() as install:
        model.install_optimized_model_weights()
    own = case.build()
    for param in own.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with OpCounts() as unsharded:
        _backward(own, x, microbatches)
    extra = Counter(sharded.ops)
    extra.subtract(unsharded.ops)
    return Extra({op: n for op, n in extra.items() if n}, {op: sharded.numels[op] for op in extra}, dict(install.ops))


def _backward(model: nn.Module, x: torch.Tensor, microbatches: int) -> None:
    for _ in range(microbatches):
        tower_loss(model, x).backward()


PARAMS = 2 + 2 * FLOORS
GROUPS = 1 + FLOORS
ALL_GROUP_NUMELS = sorted([ROOT_NUMEL, *[FLOOR_NUMEL] * FLOORS])
# Strategy 3 over gloo: a rank copies its shard to where it is gathered. All are in forward, and again in backward but
# for the last two floors, which stay.
GATHERED_NUMELS = [*ALL_GROUP_NUMELS, *[FLOOR_NUMEL] * (FLOORS - 2)]


ONCE = {"add.out": GROUPS, "mul_.Tensor": GROUPS}
"""Per group: what came in is added up in the main gradient, and scaled."""
CASTS = {"add_.Tensor": GROUPS, "mul.out": GROUPS, "_to_copy": 2 * GROUPS}
REGATHERED = 3 * len(GATHERED_NUMELS) - 2 * 3
"""Of three microbatches: the root and two floors stay from a backward to the next forward."""


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "microbatches", "bf16", "gathered", "others"),
    [
        (2, 1, 1, False, 0, ONCE),
        (2, 3, 1, False, len(GATHERED_NUMELS), ONCE),
        # the sum of what came in, to what was there already
        (2, 3, 3, False, REGATHERED, {**ONCE, "add_.Tensor": 2 * (GROUPS + GROUPS)}),
        # into the main gradient itself, scaled in the copy; one process has nothing to divide by
        (1, 0, 1, False, 0, {}),
        (2, 0, 1, False, 0, {"copy_": 0, "mul.out": PARAMS}),
        # casts are in the copies, and once per group for the optimizer
        (2, 2, 1, True, 0, CASTS),
        (2, 3, 1, True, len(GATHERED_NUMELS), CASTS),
    ],
)
def test_each_gradient_is_copied_once_and_of_weights_own_shards_only(
    run_ranks: RunRanks,
    num_ranks: int,
    strategy: int,
    microbatches: int,
    bf16: bool,
    gathered: int,
    others: dict[str, int],
) -> None:
    for extra in run_ranks(num_ranks, count_extra, strategy, microbatches, bf16):
        # Per parameter and microbatch: one copy into the bucket.
        wanted = {"copy_": microbatches * PARAMS + gathered, **others}
        assert extra.ops == {name: times for name, times in wanted.items() if times}
        # Main weights into compute weights, one shard per group.
        assert extra.install_ops == ({"copy_": GROUPS} if bf16 else {})
        if others is ONCE:
            of_gathers = sum(GATHERED_NUMELS) // 2 if gathered else 0
            assert sum(extra.numels["copy_"]) == ROOT_NUMEL + FLOORS * FLOOR_NUMEL + of_gathers
            for name in ONCE:
                assert sorted(extra.numels[name]) == [numel // 2 for numel in ALL_GROUP_NUMELS]
        if num_ranks == 1:
            assert sum(extra.numels["copy_"]) == sum(ALL_GROUP_NUMELS)


@on_ranks(1)
def test_shown_gradients_are_read_back_by_group_and_not_one_by_one() -> None:
    """Under the default policy a bf16 model shows copies of its main gradients, which are read back."""
    for num_layers in (2, 6):
        net = nn.Sequential(*(nn.Linear(7, 7) for _ in range(num_layers))).to(torch.bfloat16)
        model = fully_shard_model(net, fsdp_unit_modules=[])
        for _ in range(2):
            with OpCounts() as counts:
                _backward(model, torch.randn(2, 7, dtype=torch.bfloat16), 1)
        by_group = ("_foreach_copy_", "eq.Tensor", "where.self", "_foreach_zero_")
        assert [counts.ops[name] for name in by_group] == [1, 1, 1, 1]
