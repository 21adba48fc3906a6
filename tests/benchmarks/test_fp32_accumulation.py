"""How errors of bfloat16 sums are ordered, on fixed seeds, with bounds; docs/precision.md shows the whole table."""

import pytest
import torch

from benchmarks.fp32_accumulation import (
    CASES,
    HALF_ULP,
    Error,
    exact_sum,
    gradients,
    in_float32,
    in_float32_rounded,
    main,
    measure_here,
    ring,
    simulate,
    tree,
)
from tests.conftest import RunRanks

NUMEL = 4096
RANKS = (2, 4, 8, 64, 512)
FLOAT32_ROUNDING = 2.0**-24


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_sum_in_float32_is_off_by_one_rounding_whatever_the_number_of_ranks(case: str, ranks: int) -> None:
    parts = gradients(case, ranks, NUMEL)
    exact = exact_sum(parts)
    added = sum(part.double().abs() for part in parts)
    assert isinstance(added, torch.Tensor)
    in_sum = ranks * FLOAT32_ROUNDING * added  # the textbook bound of a running sum
    assert bool(((in_float32(parts).double() - exact).abs() <= in_sum).all())
    off = (in_float32_rounded(parts).double() - exact).abs()
    assert bool((off <= HALF_ULP * exact.abs() + (1 + HALF_ULP) * in_sum).all())
    assert bool((off > 0.9 * HALF_ULP * exact.abs()).any())  # and the bound is reached


@pytest.mark.parametrize("case", CASES)
def test_a_sum_in_bfloat16_gets_worse_with_more_ranks_and_a_ring_more_than_a_tree(case: str) -> None:
    errors = {ranks: simulate(case, ranks, NUMEL) for ranks in RANKS}
    once = {ranks: found["fp32, rounded once"].rms for ranks, found in errors.items()}
    rings = [errors[ranks]["bf16 ring"].rms / once[ranks] for ranks in RANKS]
    trees = [errors[ranks]["bf16 tree"].rms / once[ranks] for ranks in RANKS]
    assert rings[0] == trees[0] == 1.0  # two ranks: one addition, one rounding
    assert rings == sorted(rings)
    assert [ratio > least for ratio, least in zip(rings, (0.9, 1.3, 1.7, 4.0, 10.0), strict=True)] == [True] * 5
    assert all(1.2 < by_tree < by_ring for by_tree, by_ring in zip(trees[1:], rings[1:], strict=True))
    assert trees[-1] < 4.0 < rings[-1]


def test_a_ring_stalls_where_the_sum_outgrows_what_is_added() -> None:
    """256 + 1 is 256 in bfloat16, so 511 more ranks that agree add nothing; in pairs, and in float32, all count."""
    parts = [torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16) for rank in range(512)]
    exact = torch.tensor([767.0])
    assert ring(parts).item() == 256.0
    assert tree(parts).item() == 768.0
    assert torch.equal(in_float32(parts), exact)
    assert in_float32_rounded(parts).item() == exact.bfloat16().item() == 768.0


def both(case: str) -> dict[str, Error]:
    return measure_here(case, NUMEL)


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_real_collectives_err_as_the_simulation_says(run_ranks: RunRanks, case: str, ranks: int) -> None:
    simulated = simulate(case, ranks, NUMEL)
    for found in run_ranks(ranks, both, case):
        ours, plain = found["fp32, rounded once"], found["bf16 reduce-scatter"]
        assert ours == simulated["fp32, rounded once"]
        assert plain.rms == pytest.approx(simulated["bf16 ring"].rms, rel=0.1)
        assert plain.rms > 1.3 * ours.rms or ranks == 2


def test_the_program_prints_a_line_for_each_case_and_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--numel", "64", "--ranks", "2", "8", "--real-ranks"])
    printed = capsys.readouterr().out
    assert [line.split(" | ")[:2] for line in printed.splitlines() if line.startswith(("| ind", "| agr"))] == [
        ["| independent", "2"],
        ["| independent", "8"],
        ["| agreeing", "2"],
        ["| agreeing", "8"],
    ]
