"""Seeds and equality: what comparing a sharded run with one process begins and ends with."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """Seed torch's generators for the block, then restore their states."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def assert_equal_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Assert the same names, shapes, dtypes and values: |actual - expected| <= atol + rtol * |expected|.

    With both tolerances at 0 values must be equal bit for bit, except that 0.0 equals -0.0; NaN equals nothing.
    """
    torch.testing.assert_close(dict(actual), dict(expected), rtol=rtol, atol=atol, check_device=False)
