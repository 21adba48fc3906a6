"""How often an optimizer's step looks for parameters that lie side by side."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from megatron_fsdp.optim import local_step
from megatron_fsdp.optim.local_step import find_runs


@contextlib.contextmanager
def counting_looks() -> Iterator[list[int]]:
    """A list whose last number grows by one whenever runs are looked for."""
    looks: list[int] = []

    def counted(*args: Any) -> Any:
        looks[-1] += 1
        return find_runs(*args)

    with mock.patch.object(local_step, "find_runs", counted):
        yield looks
