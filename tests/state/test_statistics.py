"""Statistics from shards equal those of the whole tensors."""

import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp.state.statistics import ModelStatistics, TensorStatistics
from tests.conftest import RunRanks
from tests.optim.test_decoupled_grad import decoupled_sgd
from tests.support.api_net import gradients
from tests.support.case import Run, Scenario, Setting, two_steps
from tests.support.counting import OpCounts
from tests.support.on_ranks import on_ranks
from tests.support.zoo import MODEL_CASES, ModelName


def expected(tensor: Tensor) -> TensorStatistics:
    """By torch's own functions on a whole tensor."""
    values = tensor.detach().double().flatten()
    finite = values[values.isfinite()]
    some = finite.numel() > 0
    return TensorStatistics(
        numel=values.numel(),
        mean=finite.mean().item() if some else math.nan,
        std=finite.std(correction=0).item() if some else math.nan,
        norm=finite.norm().item(),
        min=finite.min().item() if some else math.nan,
        max=finite.max().item() if some else math.nan,
        zero_fraction=(values == 0).double().mean().item(),
        nan_count=int(values.isnan().sum()),
        inf_count=int(values.isinf().sum()),
    )


def assert_statistics(found: ModelStatistics, tensors: dict[str, Tensor]) -> None:
    assert found.tensors.keys() == tensors.keys()
    every = torch.cat([tensor.detach().double().flatten() for tensor in tensors.values()])
    pairs = [(found.tensors[name], expected(tensor)) for name, tensor in tensors.items()]
    for got, want in [*pairs, (found.total, expected(every))]:
        for key, value in asdict(want).items():
            given = asdict(got)[key]
            # Sums of at most some thousand float64 values in another order.
            assert math.isclose(given, value, rel_tol=1e-12, abs_tol=1e-15) or (math.isnan(given) and math.isnan(value))


def run_of(name: ModelName, strategy: int, decoupled: bool = False) -> Run:
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float64) if decoupled else MixedPrecisionPolicy()
    scenario = Scenario(two_steps, MODEL_CASES[name], decoupled_sgd)
    return Run(scenario, Setting(strategy, policy, options=(("use_decoupled_grad", decoupled),)))


Found = tuple[ModelStatistics, dict[str, Tensor], ModelStatistics, dict[str, Tensor], int]


def describe(name: ModelName, strategy: int, decoupled: bool = False) -> Found:
    run = run_of(name, strategy, decoupled)
    run.backward(0)
    model = run.sharded
    assert model is not None
    with OpCounts() as counts:
        parameters = model.parameter_statistics()
    with OpCounts() as counts_of_gradients:
        of_shown = model.gradient_statistics()
    collectives = len(counts.collectives.others) + counts.collectives.reductions + counts.collectives.gathers
    of_gradients = counts_of_gradients.collectives
    assert len(of_gradients.others) + of_gradients.reductions + of_gradients.gathers == collectives
    return parameters, model.full_parameters(), of_shown, gradients(model), collectives


@pytest.mark.full(short=["3-1-odd_shapes", "3-3-tied"])
@pytest.mark.parametrize(
    ("ranks", "strategy", "name"),
    [
        (1, 3, "unused"),
        (3, 0, "scalars"),
        (3, 1, "odd_shapes"),
        (3, 2, "partly_frozen"),
        (3, 3, "tied"),
        (3, 3, "bf16_fp32_norm"),
    ],
)
def test_weights_and_gradients_are_described_as_on_one_process(
    run_ranks: RunRanks, ranks: int, strategy: int, name: ModelName
) -> None:
    everyone = run_ranks(ranks, describe, name, strategy)
    for parameters, weights, of_shown, shown, collectives in everyone:
        assert_statistics(parameters, weights)
        assert_statistics(of_shown, shown)
        assert collectives == (0 if ranks == 1 or strategy == 0 else 2)  # an agreement, and the numbers
        assert (repr(parameters), repr(of_shown)) == (repr(everyone[0][0]), repr(everyone[0][2]))


def test_decoupled_gradients_are_described(run_ranks: RunRanks) -> None:
    for _, _, of_shown, shown, _ in run_ranks(2, describe, "odd_shapes", 3, True):
        assert shown
        assert_statistics(of_shown, shown)


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(3)
def test_values_that_are_not_finite_are_counted_and_left_out(strategy: int) -> None:
    """NaN, infinities, zeros, a huge mean, and tensors of which nothing is finite; of a model without an optimizer."""
    case = MODEL_CASES["odd_shapes"]
    model = fully_shard_model(case.build(), fsdp_unit_modules=list(case.unit_classes), zero_dp_strategy=strategy)
    case.loss(model, case.make_batch(4, torch.Generator().manual_seed(0))).backward()
    assert_statistics(model.gradient_statistics(), gradients(model))
    bad = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 3.0])
    with model.full_parameters_context(writeback=True), torch.no_grad():
        for position, (_, param) in enumerate(model.module.named_parameters()):
            flat = param.view(-1)
            if position == 0:
                flat.fill_(math.nan)
            elif position == 1:
                flat.zero_()
            elif position == 2:
                flat.add_(1e6)
            else:
                flat[: flat.numel() // 2] = bad.repeat(flat.numel())[: flat.numel() // 2]
    found = model.parameter_statistics()
    weights = model.full_parameters()
    assert_statistics(found, weights)
    assert found.total.nan_count > 0
    assert found.total.inf_count > 0
