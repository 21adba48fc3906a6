"""A few random models saved under one arrangement and loaded under another; `tools/fuzz.py --checkpoints` runs many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzzing.checkpoints import draw_pair, load_on_rank, save_on_rank
from tests.support.dcp_contents import assert_same_contents, contents

CASES = 6


@pytest.mark.full(short=["4"])
@pytest.mark.parametrize("seed", range(CASES))
def test_a_random_model_is_resharded_bit_for_bit(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, seed: int
) -> None:
    saved, loaded = draw_pair(seed)
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    assert run_ranks(saved.mesh.num_ranks, save_on_rank, saved, source) == [[]] * saved.mesh.num_ranks
    assert run_ranks(loaded.mesh.num_ranks, load_on_rank, loaded, source, target) == [[]] * loaded.mesh.num_ranks
    assert_same_contents(contents(target), contents(source))


def test_pairs_differ_in_arrangement_and_follow_from_their_seed() -> None:
    assert draw_pair(7) == draw_pair(7)
    pairs = [draw_pair(seed) for seed in range(50)]
    assert sum(saved.mesh != loaded.mesh for saved, loaded in pairs) > 35
    assert any(saved.mesh.tensor and not loaded.mesh.tensor for saved, loaded in pairs)
