"""Mixed precision equals one process that keeps float32 main weights beside bfloat16 compute weights.

The one process takes the slices of the ranks one after another, so that the rounding inside forward and backward is the
same in both; what the bands leave room for is the rounding of reduction and accumulation alone.
"""

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy
from tests.conftest import RunRanks
from tests.support.models import (
    MODEL_CASES,
    Batch,
    Block,
    ModelCase,
    TinyTransformer,
    UnusedBlock,
    make_token_batch,
    token_loss,
)
from tests.support.sharded_run import (
    FP32,
    Outcome,
    Run,
    Scenario,
    Setting,
    Tolerance,
    assert_values,
    check_strategies,
    run_sharded,
)

STEPS, MICROBATCHES, LR = 3, 2, 0.05


def build_bf16_transformer() -> nn.Module:
    return TinyTransformer(layers=2).bfloat16()


BF16 = ModelCase(build_bf16_transformer, make_token_batch, token_loss, (Block,))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def accumulate_and_step(run: Run) -> None:
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            (run.loss(MICROBATCHES * step + microbatch) / MICROBATCHES).backward()
        run.step()


def main_weight_reference(num_ranks: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients (averaged and summed in float32) and main weights after each step, on one process.

    Compute weights are bfloat16, main weights and optimizer float32, as the default policy says.
    """
    run = Run(Scenario(accumulate_and_step, BF16, momentum), None, num_ranks)
    model = run.model
    main = nn.ParameterDict({name.replace(".", "/"): p.detach().float() for name, p in model.named_parameters()})
    optimizer = momentum(main)
    history = []
    for step in range(STEPS):
        sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
        for microbatch in range(MICROBATCHES):
            whole = run.whole_batch(MICROBATCHES * step + microbatch)
            for rank in range(num_ranks):
                model.zero_grad()
                (run.case.loss(model, whole.part(rank, num_ranks)) / MICROBATCHES).backward()
                for name, p in model.named_parameters():
                    assert p.grad is not None
                    sums[name] += p.grad.float() / num_ranks
        for name, gradient in sums.items():
            main[name.replace(".", "/")].grad = gradient
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(main[name.replace(".", "/")])
        history.append((sums, {name: main[name.replace(".", "/")].detach().clone() for name in sums}))
    return history


# What each policy rounds: bfloat16 has 8 significant bits, so one rounding errs by 2**-9 of the value.
BANDS: dict[str, tuple[MixedPrecisionPolicy, Tolerance]] = {
    # Nothing is rounded but in float32: only the order of sums differs.
    "fp32 gradients": (MixedPrecisionPolicy(main_grads_dtype=torch.float32), Tolerance(rtol=1e-5, of_largest=1e-6)),
    # Each rank's summand arrives as bfloat16, which it was already; what is rounded is the sum of up to 4 ranks.
    "bf16 communication": (
        MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16),
        Tolerance(of_largest=4 * 2**-9),
    ),
    # Accumulated in bfloat16 and sent as float32: the accumulated value is rounded after each microbatch.
    "bf16 accumulation": (MixedPrecisionPolicy(grad_comm_dtype=torch.float32), Tolerance(of_largest=4 * 2**-9)),
    # Everything follows the parameter: both of the above.
    "bf16 gradients": (MixedPrecisionPolicy(), Tolerance(of_largest=8 * 2**-9)),
}

LATER = {True: Tolerance(of_largest=2**-7), False: Tolerance(of_largest=2**-5)}
"""The band of gradients after the first update, for gradients that are float32 all the way, and for others.

A main weight that differs in its last bit can round to the neighbouring compute weight, 2**-8 away, which all
gradients of the next step feel a little. Rounded gradients move many weights so.
"""


@pytest.mark.full(short=["2-fp32 gradients"])
@pytest.mark.parametrize("policy_name", BANDS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bf16_model_stays_in_the_band_of_fp32_main_weights(
    run_ranks: RunRanks, num_ranks: int, policy_name: str
) -> None:
    policy, band = BANDS[policy_name]
    jobs = [(Scenario(accumulate_and_step, BF16, momentum), Setting(strategy, policy)) for strategy in range(4)]
    expected = main_weight_reference(num_ranks)
    for (_, setting), *outcomes in zip(jobs, *run_ranks(num_ranks, run_sharded, jobs), strict=True):
        _compare(setting, outcomes, expected, band)


def _compare(
    setting: Setting,
    outcomes: list[Outcome],
    expected: list[tuple[dict[str, Tensor], dict[str, Tensor]]],
    band: Tolerance,
) -> None:
    assert all(outcome.digest == outcomes[0].digest for outcome in outcomes), setting
    notes = outcomes[0].notes
    assert notes is not None
    error = 0.0
    for step, ((_, gradients), (_, weights)) in enumerate(zip(notes[0::2], notes[1::2], strict=True)):
        allowed = LATER[band is BANDS["fp32 gradients"][1]] if step else band
        assert_values(gradients, expected[step][0], allowed)
        # A gradient's error enters the weights times the learning rate; momentum adds up at most 2.71 steps of it.
        largest = max(value.abs().max().item() for value in expected[step][0].values())
        error = max(error, allowed.of_largest * largest * LR * 2.71)
        assert_values(weights, expected[step][1], Tolerance(rtol=1e-6, atol=1e-7 + error))


def small_steps(run: Run) -> None:
    """Updates far below the resolution of bfloat16 add up in the main weights, until compute weights move."""
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-4
    for _ in range(8):
        run.loss(0).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.note_parameters()


@pytest.mark.full(short=["0", "3"])
@pytest.mark.parametrize("strategy", range(4))
def test_main_weights_keep_what_bfloat16_would_lose(run_ranks: RunRanks, strategy: int) -> None:
    jobs = [(Scenario(small_steps, BF16, momentum), Setting(strategy))]
    ((outcome,), _) = run_ranks(2, run_sharded, jobs)
    assert outcome.notes is not None
    initial = dict(Run(Scenario(small_steps, BF16, momentum), None, 1).model.named_parameters())
    weights = outcome.notes[0][1]["blocks.0.up.weight"]
    assert weights is not None
    assert weights.dtype == torch.float32
    moved = weights != weights.bfloat16().float()
    assert moved.float().mean() > 0.9, "main weights are on the grid of bfloat16"
    assert (weights - initial["blocks.0.up.weight"].float()).abs().max() < 8 * 1e-3
    assert outcome.losses[-1] < outcome.losses[0]


def scale_and_clear(run: Run) -> None:
    """`.grad` is a float32 copy of bfloat16 main gradients: what is done to the copy must count."""
    run.loss(0).backward()
    for param in run.parameters().values():
        assert param.grad is not None
        param.grad.mul_(0.0)
    run.loss(1).backward()
    run.note_gradients("scaled by 0, then one more")
    run.optimizer.zero_grad()
    run.loss(1).backward()
    run.note_gradients("one alone")
    run.optimizer.zero_grad(set_to_none=False)
    run.loss(1).backward()
    run.note_gradients("one after zeroing in place")


@pytest.mark.full(short=["policy0"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(main_grads_dtype=torch.float32)])
def test_changed_copies_of_main_gradients_count(run_ranks: RunRanks, policy: MixedPrecisionPolicy) -> None:
    jobs = [(Scenario(scale_and_clear, BF16, momentum), Setting(strategy, policy)) for strategy in range(4)]
    for outcome in run_ranks(2, run_sharded, jobs)[0]:
        assert outcome.notes is not None
        (_, scaled), (_, alone), (_, in_place) = outcome.notes
        assert_values(scaled, alone, Tolerance())
        assert_values(in_place, alone, Tolerance())


# ---- float16 and wider main weights on a float32 model -------------------------------------------------------------

SAME_LOOP: dict[str, tuple[MixedPrecisionPolicy, Tolerance]] = {
    # 11 significant bits: each summand and each sum of up to 3 ranks errs by 2**-12 of its value.
    "fp16 communication": (MixedPrecisionPolicy(grad_comm_dtype=torch.float16), Tolerance(of_largest=2**-9, atol=1e-6)),
    # 8 significant bits, likewise.
    "bf16 communication": (
        MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
        Tolerance(of_largest=2**-6, atol=1e-6),
    ),
    "fp64 communication": (MixedPrecisionPolicy(grad_comm_dtype=torch.float64), FP32),
}


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("settings", [range(0, 4, 2), range(1, 4, 2)])
@pytest.mark.parametrize("policy_name", SAME_LOOP)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_communication_dtype_of_a_float32_model(
    run_ranks: RunRanks, num_ranks: int, policy_name: str, settings: range
) -> None:
    policy, band = SAME_LOOP[policy_name]
    scenario = Scenario(accumulate_and_step, MODEL_CASES["odd_shapes"], momentum)
    check_strategies(run_ranks, num_ranks, scenario, [Setting(strategy, policy) for strategy in settings], band)


def large_gradients(run: Run) -> None:
    """The sum over three ranks, 90000, leaves the range of float16 (65504); the mean does not."""
    factor = 30000.0 / _largest_gradient(run, 1.0)
    run.optimizer.zero_grad()
    run.note("largest", {"largest": torch.tensor(_largest_gradient(run, factor))})
    run.note_gradients()


def _largest_gradient(run: Run, factor: float) -> float:
    """Of the whole batch, computed by every rank."""
    (factor * run.case.loss(run.model, run.whole_batch(0))).backward()
    if run.sharded is not None:
        gradients = run.sharded.full_gradients()
    else:
        gradients = {name: p.grad for name, p in run.model.named_parameters()}
    return max(value.abs().max().item() for value in gradients.values() if value is not None)


@pytest.mark.full(short=["True"])
@pytest.mark.parametrize("in_collective", [False, True])
def test_float16_communication_averages_before_the_sum(run_ranks: RunRanks, in_collective: bool) -> None:
    policy, band = SAME_LOOP["fp16 communication"]
    scenario = Scenario(large_gradients, MODEL_CASES["odd_shapes"])
    settings = [Setting(strategy, policy, average_in_collective=in_collective) for strategy in range(4)]
    check_strategies(run_ranks, 3, scenario, settings, band)


class TwiceRecomputed(nn.Module):
    """A unit that is recomputed twice per backward, and of which one layer is never used: its bucket stays open."""

    def __init__(self) -> None:
        super().__init__()
        self.block = UnusedBlock(7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


def with_grad_inputs(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error; reentrant recomputation needs inputs that take a gradient."""
    return nn.functional.mse_loss(model(batch.inputs.clone().requires_grad_()), batch.targets)


def test_a_second_gradient_for_the_same_bucket_is_scaled_like_the_first(run_ranks: RunRanks) -> None:
    policy, band = SAME_LOOP["fp16 communication"]
    case = ModelCase(TwiceRecomputed, MODEL_CASES["unused"].make_batch, with_grad_inputs, (UnusedBlock,))
    settings = [Setting(strategy, policy) for strategy in range(4)]
    check_strategies(run_ranks, 2, Scenario(accumulate_and_step, case, momentum), settings, band)
