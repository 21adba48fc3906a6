"""What a model is told about values that are not there."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.activations import Answers


class Asked(TorchDispatchMode):
    """Runs all operators by way of answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = Answers()

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        return self.answers.run(func, args, kwargs or {})


def test_conditions_get_the_answer_of_a_full_batch() -> None:
    mask = torch.empty(2, 3, dtype=torch.bool, device="meta")
    with Asked():
        assert mask.all()
        assert not mask.any()
        assert mask[0, 0]
        assert mask.all()
        assert (mask.sum() == mask.numel()).item() is True


def test_numbers_and_shapes_of_values_are_refused() -> None:
    numbers = torch.empty(3, device="meta")
    with Asked():
        with pytest.raises(ConfigurationError, match=r"asks for the value of a tensor \(torch.float32\)"):
            numbers.sum().item()
        with pytest.raises(ConfigurationError, match=r"aten.nonzero.default has no shape without values"):
            numbers.nonzero()


def test_values_that_are_there_are_told() -> None:
    with Asked():
        assert torch.tensor(3.5).item() == 3.5
        assert not torch.tensor(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_have_the_shapes_of_real_ones(dtype: torch.dtype) -> None:
    def shapes(device: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows = torch.ones(12, 16, dtype=dtype, device=device)
        stack = torch.ones(3, 16, 24, dtype=dtype, device=device)
        offsets = torch.tensor([2, 5, 12], dtype=torch.int32).to(device)
        right = torch.ones(12, 24, dtype=dtype, device=device)
        many = torch.ones(3, 12, 16, dtype=dtype, device=device)
        products = [
            torch._grouped_mm(rows, stack, offs=offsets),
            torch._grouped_mm(rows.t(), right, offs=offsets),
            torch._grouped_mm(many, stack),
        ]
        return [(tuple(product.shape), product.dtype) for product in products]

    with Asked():
        assert shapes("meta") == shapes("cpu")
