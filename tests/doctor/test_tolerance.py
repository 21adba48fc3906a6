"""What rounding may move, and what is more."""

import pytest
import torch

from megatron_fsdp.doctor.reference import Tolerance

FP32 = Tolerance(1e-5)


def test_rounding_is_no_difference_and_more_is_one() -> None:
    right = torch.linspace(-1, 1, 20)
    assert FP32.agrees(right, right * (1 + 1e-6))
    off = right.double()
    off[7] += 2.5e-5
    assert FP32.differing(right, off).nonzero().flatten().tolist() == [7]


def test_the_floor_hides_rounding_and_no_factor_of_a_small_tensor() -> None:
    large = torch.tensor([1.0, -3.0])
    allowed = FP32.among([large, torch.tensor([1e-4])])
    assert allowed.floor == pytest.approx(3e-6)
    assert allowed.agrees(torch.tensor([1e-9]), torch.tensor([-2e-6]))
    assert not allowed.agrees(torch.tensor([3e-4]), torch.tensor([6e-4]))
    assert allowed.at_step(2).floor == pytest.approx(1.2e-5)
