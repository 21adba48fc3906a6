"""The parity helpers and the model zoo: what other tests lean on holds by itself."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import MODEL_CASES, Batch, ModelCase, ModelName
from tests.support.parity import assert_equal_tensors, fixed_seed, reference_run


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _one_weight() -> nn.Module:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 2.0)
    return layer


def _product(model: nn.Module, factor: Tensor) -> Tensor:
    output: Tensor = model(factor)
    return output.sum()


def _case_run(case: ModelCase, batches: list[Batch]) -> list[dict[str, Tensor]]:
    with fixed_seed(3):
        return reference_run(case.build, _sgd, [batches], case.loss).gradients


@pytest.mark.parametrize("name", MODEL_CASES)
def test_mean_of_equal_slices_is_the_whole_batch(name: ModelName) -> None:
    case = MODEL_CASES[name]
    batch = case.make_batch(6, torch.Generator().manual_seed(1))
    (whole,), (sliced,) = _case_run(case, [batch]), _case_run(case, [batch.part(i, 3) for i in range(3)])
    low_precision = name == "bf16_fp32_norm"
    assert_equal_tensors(sliced, whole, rtol=5e-2 if low_precision else 1e-4, atol=2e-2 if low_precision else 1e-6)


@pytest.mark.parametrize("name", MODEL_CASES)
def test_same_seed_builds_the_same_weights_and_unit_classes_occur(name: ModelName) -> None:
    states = []
    for _ in range(2):
        with fixed_seed(5):
            states.append(MODEL_CASES[name].build().state_dict())
    assert_equal_tensors(states[0], states[1])
    case = MODEL_CASES[name]
    assert sum(isinstance(module, case.unit_classes) for module in case.build().modules()) >= 2


def test_zoo_holds_the_hard_cases_it_promises() -> None:
    models = {name: case.build() for name, case in MODEL_CASES.items()}
    assert models["tied"].get_parameter("head.weight") is models["tied"].get_parameter("tokens.weight")
    frozen = {name for name, p in models["partly_frozen"].named_parameters() if not p.requires_grad}
    assert {"tokens.weight", "blocks.0.up.bias", "blocks.1.project.weight"} <= frozen
    assert "blocks.1.up.weight" not in frozen
    assert {tuple(p.shape) for p in models["scalars"].parameters()} >= {(), (1,)}
    assert {p.dtype for p in models["bf16_fp32_norm"].parameters()} == {torch.bfloat16, torch.float32}
    assert {p.dtype for p in models["fp32_fp64_norm"].parameters()} == {torch.float32, torch.float64}


def test_unused_parameters_have_no_reference_gradient() -> None:
    case = MODEL_CASES["unused"]
    (gradients,) = _case_run(case, [case.make_batch(2, torch.Generator().manual_seed(1))])
    assert "0.used.weight" in gradients
    assert "0.unused.weight" not in gradients


def test_reference_run_averages_microbatches_steps_and_clips() -> None:
    microbatches = [torch.tensor([1.0]), torch.tensor([3.0])]
    run = reference_run(_one_weight, _sgd, [microbatches, microbatches], _product)
    assert run.losses == pytest.approx([4.0, 3.6])
    assert [gradients["weight"].item() for gradients in run.gradients] == [2.0, 2.0]
    assert [parameters["weight"].item() for parameters in run.parameters] == pytest.approx([1.8, 1.6])
    assert run.gradient_norms == []
    steps = [[torch.tensor([1.0]), torch.tensor([3.0])]]
    run = reference_run(_one_weight, _sgd, steps, _product, zero_between=True)
    assert run.gradients[0]["weight"].item() == 1.5
    run = reference_run(_one_weight, _sgd, [[torch.tensor([4.0])]], _product, max_norm=1.0)
    assert run.gradients[0]["weight"].item() == 4.0
    assert run.gradient_norms == [4.0]
    assert run.parameters[0]["weight"].item() == pytest.approx(1.9)


def test_fixed_seed_restores_the_generator() -> None:
    torch.manual_seed(11)
    expected = torch.rand(2)
    torch.manual_seed(11)
    with fixed_seed(4):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    assert not torch.equal(inside, expected)


def test_difference_names_the_first_differing_tensor() -> None:
    expected = {"a": torch.ones(2), "b": torch.tensor([1.0, 2.0, 4.0]), "c": torch.ones(1)}
    actual = {"a": torch.ones(2), "b": torch.tensor([1.0, 2.5, 4.0]), "c": torch.zeros(1)}
    with pytest.raises(
        AssertionError, match=r"b \(3,\): 1 of 3 .* index 1: got 2.5, expected 2, max abs error 0.5, 0.125"
    ):
        assert_equal_tensors(actual, expected)
    assert_equal_tensors({"b": actual["b"]}, {"b": expected["b"]}, rtol=0.25)


def test_names_shapes_dtypes_and_nans_must_agree_and_slices_be_even() -> None:
    differing: list[tuple[dict[str, Tensor], str]] = [
        ({}, r"missing \['a'\]"),
        ({"a": torch.ones(2), "z": torch.ones(1)}, r"unexpected \['z'\]"),
        ({"a": torch.ones(3)}, r"a: got torch.float32 \(3,\), expected torch.float32 \(2,\)"),
        ({"a": torch.ones(2).double()}, r"a: got torch.float64"),
        ({"a": torch.tensor([1.0, torch.nan])}, r"a \(2,\): 1 of 2"),
    ]
    for actual, message in differing:
        with pytest.raises(AssertionError, match=message):
            assert_equal_tensors(actual, {"a": torch.ones(2)}, rtol=1.0, atol=1.0)
    batch = Batch(torch.zeros(5, 1), torch.zeros(5, 1))
    with pytest.raises(ValueError, match=r"5 samples do not divide into 2 equal parts; choose a multiple of 2\."):
        batch.part(0, 2)
