"""The short suite (`pytest --short`) and the full one (`pytest`): which cases only the full one runs.

    @pytest.mark.full                       the whole test
    @pytest.mark.full(short=["optim-2"])    all parameter sets but those with these ids
    @pytest.mark.full(cover=1)              all but a choice in which every value of every parameter comes once
    @pytest.mark.full(cover=2)              all but a covering array, in which every pair of values meets once

A fact is proved once in the short suite. Its repetition over sizes, models and ranks, long runs, kills and random cases
are full; hypothesis draws 30 examples in the short suite and 100 in the full one. Every file keeps a short case, so
that no subject is left out.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def leave_out_full(items: list[pytest.Item], whole_files: bool) -> list[pytest.Item]:
    """Remove from `items`, in place, what only the full suite runs, and return it.

    Refuses a mark that names an id that no parameter set has and, if all tests of every file were collected
    (`whole_files`), a file without a short case.
    """
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("full") is not None:
            groups[item.nodeid.split("[")[0]].append(item)
    full = {item for group in groups.values() for item in _full_cases(group)}
    short_files = {item.path for item in items if item not in full}
    bare = sorted({str(item.path) for item in full if item.path not in short_files})
    if whole_files and bare:
        told = f"no case of {', '.join(bare)} is in the short suite; keep one (tests/support/tiers.py)"
        raise pytest.UsageError(told)
    left_out = [item for item in items if item in full]
    items[:] = [item for item in items if item not in full]
    return left_out


def covering(rows: Sequence[Mapping[str, Any]], strength: int) -> list[int]:
    """Choose rows, by position, so that what `strength` columns hold together in any they hold in a chosen one."""
    held = [set(combinations(sorted((name, repr(value)) for name, value in row.items()), strength)) for row in rows]
    missing: set[object] = set().union(*held)
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(held[index] & missing))
        chosen.append(best)
        missing -= held[best]
    return sorted(chosen)


def _full_cases(group: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of the parameter sets of one test, those that its mark leaves to the full suite."""
    mark = group[0].get_closest_marker("full")
    assert mark is not None
    specs = [getattr(item, "callspec", None) for item in group]
    ids = ["" if spec is None else spec.id for spec in specs]
    keep = set(mark.kwargs.get("short", ()))
    if "cover" in mark.kwargs:
        rows = [{} if spec is None else spec.params for spec in specs]
        keep |= {ids[index] for index in covering(rows, mark.kwargs["cover"])}
    if len(group) > 1 and not keep <= set(ids):
        raise pytest.UsageError(f"{group[0].nodeid}: no parameter set has the id {sorted(keep - set(ids))}")
    return [item for item, each in zip(group, ids, strict=True) if each not in keep]
