"""Planted changes of random tensors are told by name, whatever their shape and values."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_fsdp.doctor.diagnose import Context, Diagnosis, Tolerance, diagnose, tell_ratio

FP32 = Tolerance(1e-5)
seeds = st.integers(0, 2**31)
ranks = st.integers(2, 8)


def noise(*shape: int, seed: int) -> Tensor:
    """Values that are all different and not small."""
    generator = torch.Generator().manual_seed(seed)
    size = 0.5 + torch.rand(*shape, generator=generator)
    return size * torch.where(torch.rand(*shape, generator=generator) < 0.5, -1.0, 1.0)


def rounded(value: Tensor, seed: int) -> Tensor:
    """The value with the rounding of another order of summation."""
    return value * (1 + 1e-6 * (noise(*value.shape, seed=seed + 1)))


def told(expected: Tensor | None, found: Tensor | None, **context: object) -> Diagnosis:
    return diagnose(expected, found, Context(**{"num_ranks": 2, **context}), FP32)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(seeds, ranks, st.integers(1, 6), st.sampled_from(["N", "1/N", "sqrt(N)", "1/sqrt(N)", "2", "K", "1/K"]))
def test_a_factor_is_named(seed: int, n: int, k: int, which: str) -> None:
    ratios = {
        "N": n,
        "1/N": 1 / n,
        "sqrt(N)": math.sqrt(n),
        "1/sqrt(N)": 1 / math.sqrt(n),
        "2": 2.0,
        "K": k,
        "1/K": 1 / k,
    }
    names = {
        "N": f"the number of ranks, {n}",
        "1/N": f"1/{n}, one over the number of ranks",
        "sqrt(N)": f"sqrt({n}), the square root",
        "1/sqrt(N)": f"1/sqrt({n}), one over the square root",
        "2": "2 times",
        "K": f"the number of microbatches, {k}",
        "1/K": f"1/{k}, one over the number of microbatches",
    }
    assume(k > 1 or "K" not in which)
    right = noise(5, 7, seed=seed)
    found = told(right, rounded(right * ratios[which], seed), num_ranks=n, microbatches=k)
    assert found.kind == "factor"
    assert names[which] in found.words
    assert found.ratio == pytest.approx(ratios[which])


@settings(max_examples=40)
@given(seeds, st.floats(-40, 40).filter(lambda r: abs(r) > 0.05 and abs(r - 1) > 0.05))
def test_any_factor_is_measured(seed: int, ratio: float) -> None:
    right = noise(9, seed=seed)
    found = told(right, right * ratio)
    assert found.kind == "factor"
    assert found.ratio == pytest.approx(ratio, rel=1e-5)


def test_a_few_elements_are_a_multiple_only_where_nothing_else_explains_them() -> None:
    right = torch.tensor([0.3])
    assert told(right, right.to(torch.bfloat16).float()).kind == "rounded"
    assert told(right, right * 2).ratio == 2.0
    assert told(right, right * 7).ratio == pytest.approx(7.0)


@settings(max_examples=40)
@given(seeds, st.integers(2, 6), st.integers(1, 3), st.integers(2, 4), st.data())
def test_elements_in_other_places_are_placed(seed: int, n: int, rows: int, columns: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, n - 2))
    high = data.draw(st.integers(low + 1, n - 1))
    right = noise(n * rows, columns, seed=seed)
    pieces = list(right.split(rows))
    pieces[low], pieces[high] = pieces[high], pieces[low]
    found = told(right, rounded(torch.cat(pieces), seed), num_ranks=n)
    assert found.kind == "moved"
    if found.words != "is transposed":  # rows of a square that are swapped may be that
        assert f"(rows {low * rows} to {(high + 1) * rows - 1} of {n * rows})" in found.words


def test_a_transposed_tensor_is_named() -> None:
    right = noise(3, 5, seed=0)
    assert told(right, right.t().reshape(right.shape)).words == "is transposed"


@settings(max_examples=40)
@given(seeds, ranks)
def test_gradients_that_are_not_reduced_are_told_by_rank(seed: int, n: int) -> None:
    own = tuple(noise(2 * n, 3, seed=seed + rank) for rank in range(n))
    right = torch.stack(own).mean(0)
    alone = told(right, own[n - 1], num_ranks=n, of_ranks=own)
    assert alone.words == f"is not reduced over ranks: it equals the gradient of rank {n - 1}'s samples alone"
    shards = torch.cat([value[2 * rank : 2 * rank + 2] / n for rank, value in enumerate(own)])
    pieces = told(right, shards, num_ranks=n, of_ranks=own)
    assert pieces.kind == "not reduced"
    assert pieces.words.endswith(f"each piece equals the gradient of one rank's samples alone, divided by {n}")
    if n == 2:
        return  # what lacks one of two is the other one alone
    lacking = told(right, right - own[1] / n, num_ranks=n, of_ranks=own)
    assert lacking.words == "lacks the gradient of rank 1's samples: it is not in the sum"


@settings(max_examples=40)
@given(seeds)
def test_stale_values_are_named(seed: int) -> None:
    right, before = (noise(4, 3, seed=seed + i) for i in range(2))
    found = told(right, before, stale=before, stale_words="the gradient at the weights before update 1")
    assert found.kind == "stale"
    assert found.words == "is stale by one step: it is the gradient at the weights before update 1"


@settings(max_examples=40)
@given(seeds, st.integers(1, 5), st.integers(2, 6))
def test_a_fault_in_a_part_is_placed(seed: int, start: int, length: int) -> None:
    right = noise(start + length + 2, seed=seed)
    wrong = right.clone()
    wrong[start : start + length] *= 2
    found = told(right, wrong)
    assert found.kind == "factor"
    assert found.words == (
        f"is right but for elements {start}..{start + length - 1} of {len(right)}; that piece is 2 times what it "
        "should be (the number of ranks, 2: summed over ranks where the mean is wanted, or doubled (three ranks would "
        "tell))"
    )


def test_what_is_absent_zero_or_not_finite_is_named() -> None:
    right = noise(6, seed=0)
    broken = right.clone()
    broken[2] = math.nan
    assert told(right, None).words == "is missing (None): one process has a gradient"
    assert told(None, right).kind == "unexpected"
    assert told(right, right * 0).words == "is zero"
    assert told(right, broken).words == "is NaN in 1 of 6 elements"
    assert told(right, right[:4]).words == "has the shape (4,) where one process has (6,)"
    assert told(right, -right).words == "is the negative of what it should be: the sign is flipped"


def test_what_fits_nothing_is_said_so() -> None:
    found = told(noise(30, seed=0), noise(30, seed=1))
    assert found.kind == "unknown"
    assert "fits no simple cause" in found.words


@settings(max_examples=40)
@given(seeds)
def test_rounding_is_no_difference_and_more_is_one(seed: int) -> None:
    right = noise(20, seed=seed)
    largest = float(right.abs().max())
    assert FP32.agrees(right, rounded(right, seed))
    off = right.double()
    off[7] += 2.5e-5 * largest
    assert FP32.differing(right, off).nonzero().flatten().tolist() == [7]


def test_tolerance_grows_with_steps_and_takes_what_is_allowed_besides() -> None:
    right: Callable[[], Tensor] = lambda: torch.tensor([1.0, 0.0])  # noqa: E731
    assert FP32.allowed(right()).tolist() == pytest.approx([2e-5, 1e-5])
    assert FP32.at_step(3).allowed(right()).tolist() == pytest.approx([3.2e-4, 1.6e-4])
    assert FP32.agrees(right(), right() + 1e-3, torch.tensor([1e-3, 1e-3], dtype=torch.float64))


def test_the_floor_hides_rounding_and_no_factor_of_a_small_tensor() -> None:
    large = torch.tensor([1.0, -3.0])
    allowed = FP32.among([large, None, torch.tensor([1e-4])])
    assert allowed.floor == pytest.approx(3e-6)
    assert allowed.agrees(torch.tensor([1e-9]), torch.tensor([-2e-6]))
    assert not allowed.agrees(torch.tensor([3e-4]), torch.tensor([6e-4]))
    assert allowed.at_step(2).floor == pytest.approx(1.2e-5)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16")]
)
def test_rounding_is_named_by_its_dtype(dtype: torch.dtype, name: str) -> None:
    right = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    told = diagnose(right, right.to(dtype), Context(2, what="value"), Tolerance(1e-10))
    assert told.kind == "rounded"
    assert f"rounded as {name} would" in told.words
    mean: Tensor = torch.stack([(right * k).to(dtype).double() / k for k in (1.7, 0.6)]).mean(0)
    assert f"as {name}" in diagnose(right, mean, Context(2), Tolerance(1e-10)).words
    assert diagnose(right, mean, Context(2, what="value"), Tolerance(1e-10)).kind == "unknown"


def test_no_ratio_is_told_as_one() -> None:
    assert tell_ratio(1 + 1e-5, 2, 1) == "1 + 1e-05 times what it should be"
    assert tell_ratio(1 - 2e-6, 2, 1) == "1 - 2e-06 times what it should be"
