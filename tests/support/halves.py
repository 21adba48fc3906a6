"""Tests of scripts under strategies, of which the short suite runs half: every script, and every strategy."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.sharded_run import Run, Setting

Test = Callable[..., None]


def each_half(settings: tuple[Any, ...], *scripts: Callable[[Run], None]) -> Callable[[Test], Test]:
    """Parametrize a test by `script`, where there are some, and by `settings`, the even and the odd ones."""

    def mark(test: Test) -> Test:
        test = pytest.mark.parametrize("settings", [settings[::2], settings[1::2]], ids=["even", "odd"])(test)
        if not scripts:
            return pytest.mark.full(short=["odd"])(test)
        return pytest.mark.full(cover=1)(pytest.mark.parametrize("script", scripts)(test))

    return mark


STRATEGIES = tuple(Setting(strategy) for strategy in range(4))
