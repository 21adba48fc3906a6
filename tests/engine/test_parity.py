"""Every strategy equals one process on the whole batch: losses, gradients and the first three updates.

The other dimensions are dealt out so that every model meets every optimizer, zeroing and way to call.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy
from tests.conftest import RunRanks
from tests.support.api_net import gradients, weights
from tests.support.case import (
    FP32,
    ONE_RANK,
    OptimizerFn,
    Run,
    Scenario,
    Setting,
    Tolerance,
    adamw_above_noise,
    check_jobs,
    check_strategies,
    shard,
)
from tests.support.on_ranks import assert_equal_tensors, fixed_seed
from tests.support.zoo import MODEL_CASES, Batch, MixedDtypeBlock, ModelName, odd_case

PLACES = [*((2, strategy) for strategy in range(4)), (1, 0), (1, 3), (3, 1), (3, 2), (3, 3), (4, 0), (4, 3)]
"""Ranks and strategies that train all models."""

_OWN_DTYPES = MixedPrecisionPolicy(main_params_dtype=None)
"""Main weights in the dtype of each parameter, as one process has them (float64 is not narrowed to float32)."""

_FP64 = Tolerance(rtol=1e-12, atol=1e-13)
BF16 = Tolerance(rtol=2**-5, atol=2**-6)
"""bfloat16 has 8 bits; slices of a batch and three updates each round."""

# eps: where the exact gradient is 0 (softmax ignores the bias of keys), both runs hold rounding noise of 1e-9, which a
# small eps would turn into full steps of arbitrary sign.
_EPS = 1e-3


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups, with and without decay, of different rates."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=_EPS)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=_EPS, momentum=0.5)


def fused_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=_EPS, fused=True)


OPTIMIZERS: tuple[OptimizerFn, ...] = (adamw, nesterov, rmsprop, fused_adam)


def train(run: Run, microbatches: int, zero_between: bool = False) -> None:
    """Gradients add up over microbatches, or only those of the last one count."""
    for step in range(3):
        for microbatch in range(microbatches):
            if zero_between:
                run.optimizer.zero_grad()
            loss = run.loss(10 * step + microbatch)
            (loss / microbatches).backward()
        run.step()


one_microbatch, three_microbatches = (partial(train, microbatches=count) for count in (1, 3))
SCRIPTS = [
    [partial(each, zero_between=zeroed) for zeroed in (False, True)] for each in (one_microbatch, three_microbatches)
]
"""Scripts by microbatches, then zeroing."""


def jobs_of(num_ranks: int, strategy: int) -> list[tuple[ModelName, Scenario, Setting]]:
    """What (ranks, strategy) trains: every model, half of them with three microbatches."""
    turn = 4 * (num_ranks - 1) + strategy
    jobs = []
    for position, name in enumerate(MODEL_CASES):
        counts = SCRIPTS[(position + num_ranks + strategy) % 2]
        script = counts[(position // 2 + num_ranks) % 2]
        optimizer = OPTIMIZERS[(position + turn // 4 + turn) % 4]
        policy = _OWN_DTYPES if name in ("fp32_fp64_norm", "bf16_fp32_norm") else MixedPrecisionPolicy()
        setting = Setting(strategy, policy, one_call=(position // 4 + strategy) % 2 == 0)
        jobs.append((name, Scenario(script, MODEL_CASES[name], optimizer), setting))
    return jobs


def _tolerance(name: ModelName, num_ranks: int) -> Tolerance:
    if num_ranks == 1:
        return ONE_RANK
    return BF16 if name == "bf16_fp32_norm" else FP32


@pytest.mark.full(short=["1-3", "2-1"])
@pytest.mark.parametrize(("num_ranks", "strategy"), PLACES)
def test_training_equals_one_process_on_the_whole_batch(run_ranks: RunRanks, num_ranks: int, strategy: int) -> None:
    names, *jobs = zip(*jobs_of(num_ranks, strategy), strict=True)
    tolerances = [_tolerance(name, num_ranks) for name in names]
    check_jobs(run_ranks, num_ranks, list(zip(*jobs, strict=True)), tolerances)


# ---- float64, averaging collective ---------------------------------------------------------------------------------


FP64 = odd_case(MixedDtypeBlock, torch.float64, linear_dtype=torch.float64, norm_dtype=torch.float64)


def test_float64_agrees_to_twelve_digits(run_ranks: RunRanks) -> None:
    settings = [Setting(strategy, _OWN_DTYPES) for strategy in (1, 3)]
    check_strategies(run_ranks, 2, Scenario(three_microbatches, FP64, adamw), settings, _FP64)


def test_averaging_in_the_collective_gives_the_same_mean(run_ranks: RunRanks) -> None:
    settings = [Setting(strategy, average_in_collective=True) for strategy in (0, 2)]
    check_strategies(run_ranks, 3, Scenario(three_microbatches, MODEL_CASES["odd_shapes"]), settings)


# ---- the comparison itself can fail --------------------------------------------------------------------------------


def _forget_one_rank(run: Run) -> None:
    """A wrong loop: rank 0 counts twice as much as it should."""
    weight = 2.0 if run.sharded is not None and run.ranks_here == (0,) else 1.0
    (weight * run.loss(0)).backward()
    run.step()


def test_a_wrong_mean_is_noticed(run_ranks: RunRanks) -> None:
    with pytest.raises(AssertionError, match=r"note 0 \(gradients\)"):
        check_strategies(run_ranks, 2, Scenario(_forget_one_rank, MODEL_CASES["odd_shapes"]), [Setting(3)])


# ---- the same engine on CUDA: one NCCL rank per device against one process. Skipped where there is no GPU ------------


def train_both(name: ModelName, strategy: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients and weights of three steps, sharded and not, on this rank's device."""
    case = MODEL_CASES[name]
    on_device = replace(case, build=lambda: case.build().cuda())
    with fixed_seed(0):
        alone = on_device.build()
    options = {"zero_dp_strategy": strategy, "mixed_precision_policy": _OWN_DTYPES}
    (model, optimizer), expected = shard(on_device, adamw_above_noise, **options), adamw_above_noise(alone)
    pairs = []
    for seed in range(3):
        batch = case.make_batch(12, torch.Generator().manual_seed(seed))
        for net, part in ((alone, batch), (model, batch.part(dist.get_rank(), dist.get_world_size()))):
            case.loss(net, Batch(part.inputs.cuda(), part.targets.cuda())).backward()
        pairs.append((gradients(model), gradients(alone)))
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        pairs.append((weights(model), weights(alone)))
    return pairs


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["transformer", "tied", "scalars", "odd_shapes"])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_gpus_train_as_one_process_does(run_ranks: RunRanks, name: ModelName, strategy: int) -> None:
    for pairs in run_ranks(min(4, torch.cuda.device_count()), train_both, name, strategy, device_type="cuda"):
        for found, wanted in pairs:
            assert_equal_tensors(found, wanted, rtol=1e-4, atol=1e-5)
