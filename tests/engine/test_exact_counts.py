"""Collectives, bytes, copies and allocations of whole steps on real ranks, counted below the library."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model
from megatron_fsdp.comm.axis import Traffic
from megatron_fsdp.config.strategy import ShardingStrategy
from tests.conftest import RunRanks
from tests.support.counting import Collectives, OpCounts
from tests.support.formulas import GroupFootprint, footprints_of, step_traffic
from tests.support.zoo import (
    FLOOR_NUMEL,
    FLOORS,
    MODEL_CASES,
    ROOT_NUMEL,
    Floor,
    ModelCase,
    ModelName,
    Tower,
    tower_loss,
)

pytestmark = pytest.mark.unmerged

STRATEGIES = list(ShardingStrategy)
STEPS = 3
_SAMPLES = 2


@dataclass(frozen=True)
class Step:
    """One optimizer step: what really ran, and what the model counted itself."""

    seen: Collectives
    counted: Traffic


@dataclass(frozen=True)
class Run:
    """A few optimizer steps on one rank.

    Attributes:
        groups: What the formulas take.
        steps: One entry per optimizer step.
        transient_bytes: After each step, the bytes that the engine has borrowed.
        addresses: After each step, where the weights of each unit were last gathered.
    """

    groups: tuple[GroupFootprint, ...]
    steps: list[Step]
    transient_bytes: list[int]
    addresses: list[list[int]]


def _shard(
    case: ModelCase, strategy: int, policy: MixedPrecisionPolicy | None = None
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    model = case.build()
    return fully_shard(
        model,
        torch.optim.AdamW(model.parameters()),
        zero_dp_strategy=strategy,
        fsdp_unit_modules=list(case.unit_classes),
        mixed_precision_policy=policy or MixedPrecisionPolicy(),
    )


def run_steps(name: ModelName, strategy: int, microbatches: int) -> Run:
    case = MODEL_CASES[name]
    model, optimizer = _shard(case, int(strategy))
    run = Run(footprints_of(model), [], [], [])
    batch = case.make_batch(_SAMPLES, torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(STEPS):
        before = model.traffic()
        with OpCounts() as counts:
            for _ in range(microbatches):
                case.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.steps.append(Step(counts.collectives, model.traffic().since(before)))
        run.transient_bytes.append(model.memory().transient_peak_bytes)
        run.addresses.append([param.data_ptr() for param in model.raw_param.values()])
    return run


Runs = Callable[[ModelName, int, int, int], list[Run]]
"""(name of a model, ranks, strategy, microbatches) -> what each rank did."""


@pytest.fixture(scope="module")
def runs(run_ranks: RunRanks) -> Runs:
    """Each run when it is first asked for."""
    return cache(lambda name, num_ranks, *how: run_ranks(num_ranks, run_steps, name, *map(int, how)))


EACH: list[tuple[ModelName, int, int, int]] = [
    *(("transformer", 2, strategy, 3) for strategy in STRATEGIES),
    ("transformer", 4, 3, 1),
    ("transformer", 3, 0, 1),
    ("partly_frozen", 2, 3, 3),
    ("tied", 3, 1, 1),
    ("bf16_fp32_norm", 2, 1, 3),
    ("scalars", 2, 3, 3),
]


@pytest.mark.parametrize(("name", "num_ranks", "strategy", "microbatches"), EACH)
def test_a_steady_step_sends_what_the_formula_says_and_takes_no_new_memory(
    runs: Runs, name: ModelName, num_ranks: int, strategy: ShardingStrategy, microbatches: int
) -> None:
    """The first step only adds one agreement on what was used."""
    for run in runs(name, num_ranks, strategy, microbatches):
        expected = asdict(step_traffic(run.groups, strategy, microbatches))
        first, *later = run.steps
        assert asdict(first.counted) == expected
        assert first.seen.reductions - expected["reductions"] == (num_ranks > 1)
        for step in later:
            assert asdict(step.seen) == {**expected, "others": []}
            assert asdict(step.counted) == expected
        assert run.transient_bytes == [run.transient_bytes[0]] * STEPS
        assert run.addresses == [run.addresses[0]] * STEPS


# ---- copies -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extra:
    """What sharding adds to forward and backward in a steady step.

    Attributes:
        ops: How often operators run more often than unsharded; none less often.
        numels: For each of them, the elements of the first tensor of each sharded call.
        install_ops: Operators on one rank's shards after the optimizer step.
    """

    ops: dict[str, int]
    numels: dict[str, list[int]]
    install_ops: dict[str, int]


def count_extra(strategy: int, microbatches: int, bf16: bool) -> Extra:
    dtype = torch.bfloat16 if bf16 else torch.float32
    case = ModelCase(lambda: Tower().to(dtype), MODEL_CASES["transformer"].make_batch, tower_loss, (Floor,))
    x = torch.randn(2, 16, dtype=dtype)
    model, optimizer = _shard(case, strategy)
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


@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_each_gradient_is_copied_once_and_weights_never(run_ranks: RunRanks, strategy: int) -> None:
    for extra in run_ranks(2, count_extra, strategy, 1, False):
        # Per parameter: one copy into the bucket. Per group: what came in is added up in the main gradient, and scaled.
        assert extra.ops == {"copy_": PARAMS, "add.out": GROUPS, "mul_.Tensor": GROUPS}
        assert sum(extra.numels["copy_"]) == ROOT_NUMEL + FLOORS * FLOOR_NUMEL
        assert sorted(extra.numels["mul_.Tensor"]) == [numel // 2 for numel in ALL_GROUP_NUMELS]
        assert sorted(extra.numels["add.out"]) == [numel // 2 for numel in ALL_GROUP_NUMELS]
        assert extra.install_ops == {}


def test_accumulation_adds_to_shards(run_ranks: RunRanks) -> None:
    for extra in run_ranks(2, count_extra, 3, 3, False):
        added = extra.ops.pop("add_.Tensor")
        assert added == 2 * (GROUPS + GROUPS)  # the sum of what came in, to what was there already
        assert extra.ops == {"copy_": 3 * PARAMS, "add.out": GROUPS, "mul_.Tensor": GROUPS}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_plain_data_parallelism_scales_whole_buckets_once(run_ranks: RunRanks, num_ranks: int) -> None:
    for extra in run_ranks(num_ranks, count_extra, 0, 1, False):
        assert extra.ops == {"copy_": PARAMS, "mul.out": GROUPS}
        assert sorted(extra.numels["mul.out"]) == ALL_GROUP_NUMELS


@pytest.mark.parametrize("strategy", [2, 3])
def test_mixed_precision_casts_in_the_copies_and_once_per_group_for_the_optimizer(
    run_ranks: RunRanks, strategy: int
) -> None:
    for extra in run_ranks(2, count_extra, strategy, 1, True):
        assert extra.ops == {"copy_": PARAMS, "add_.Tensor": GROUPS, "mul.out": GROUPS, "_to_copy": 2 * GROUPS}
        assert extra.install_ops == {"copy_": GROUPS}  # main weights into compute weights, one shard per group


def operations_of_a_second_backward(num_layers: int) -> Counter[str]:
    """Under the default policy a bf16 model shows copies of its main gradients, which are read back."""
    net = nn.Sequential(*(nn.Linear(7, 7) for _ in range(num_layers))).to(torch.bfloat16)
    model = fully_shard_model(net, fsdp_unit_modules=[])
    _backward(model, torch.randn(2, 7, dtype=torch.bfloat16), 1)
    with OpCounts() as counts:
        _backward(model, torch.randn(2, 7, dtype=torch.bfloat16), 1)
    return counts.ops


def test_shown_gradients_are_read_back_by_group_and_not_one_by_one(run_ranks: RunRanks) -> None:
    few, many = run_ranks(1, operations_of_a_second_backward, 2)[0], run_ranks(1, operations_of_a_second_backward, 6)[0]
    by_group = ("_foreach_copy_", "eq.Tensor", "where.self", "_foreach_zero_")
    assert [few[name] for name in by_group] == [many[name] for name in by_group] == [1, 1, 1, 1]


def test_one_rank_sends_nothing(runs: Runs) -> None:
    for strategy in (0, 3):
        (run,) = runs("transformer", 1, strategy, 3)
        assert step_traffic(run.groups, ShardingStrategy.optim_grads_params) == Traffic(0, 0, 0, 0)
        assert all(step.seen == Collectives() for step in run.steps)
