"""What becomes true a moment later, when a thread or another process has got that far."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT_S = 600.0  # of a program
PATIENCE_S = 120.0  # a guard against waiting for ever: no test asserts how long anything took
_PAUSE_S = 0.02


def settled(measure: Callable[[], T], is_settled: Callable[[T], bool]) -> T:
    """Measure until the value is final, or for two minutes; the test then asserts it.

    gloo's thread, for one, holds what it sent until a moment after the wait for it has ended.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not is_settled(value := measure()) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return value


def steady(measure: Callable[[], T]) -> T:
    """Measure until the value is the same three times: what a test used may be let go of a moment after its end."""
    values = [measure()]
    while len(values) < 3 or len(set(values[-3:])) > 1:
        time.sleep(_PAUSE_S)
        values.append(measure())
    return values[-1]
