"""What counts as an unexpectedly large gradient, by values; on one process."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.engine.gradient_checks import LargeGradientCheck
from megatron_fsdp.errors import ConfigurationError, LargeGradientError
from tests.support.op_counts import OpCounts

CPU = torch.device("cpu")


def make(factor: float = 100.0, history: int = 3) -> LargeGradientCheck:
    return LargeGradientCheck(["a", "b"], [None], CPU, {"a": "bucket 2"}, factor, history)


def backward(check: LargeGradientCheck, **gradients: float) -> str:
    """One backward with the given largest magnitudes; what it raised."""
    check.begin()
    for name, value in gradients.items():
        check.record(name, torch.tensor([0.0, -value, value / 2]))
    try:
        check.conclude()
    except LargeGradientError as error:
        return str(error)
    return ""


def test_the_message_names_bucket_parameter_value_and_the_largest_before() -> None:
    check = make()
    assert [backward(check, a=value, b=1.0) for value in (1.0, 2.5, 0.5)] == [""] * 3
    assert backward(check, a=250.0, b=1.0) == ""  # 100 times is not above 100 times
    assert backward(check, a=25001.0, b=7.0) == (
        "the gradients of 1 parameters are unexpectedly large before reduction, more than 100 times the largest "
        "before: a (bucket 2) on rank [0] has 2.5e+04, and had at most 250 in 4 backwards (global ranks, largest "
        "magnitudes); look at loss and data, then call zero_grad and go on or stop"
    )
    both = backward(check, a=1e6, b=1e6)
    assert "of 2 parameters" in both
    assert both.index("b on rank") < both.index("a (bucket 2)")  # b grew more


def test_a_large_gradient_leaves_no_trace_in_the_history() -> None:
    check = make()
    for _ in range(3):
        backward(check, a=1.0, b=1.0)
    for _ in range(2):
        assert "a (bucket 2) on rank [0] has 500, and had at most 1 in 3 backwards" in backward(check, a=500.0, b=50.0)
    assert "b on rank [0] has 101, and had at most 1 in 3 backwards" in backward(check, b=101.0)
    assert backward(check, a=99.0, b=99.0) == ""


def test_nothing_is_said_before_there_is_a_history_of_gradients_other_than_zero() -> None:
    check = make()
    for _ in range(20):
        assert backward(check, a=0.0, b=1.0) == ""  # such as weights behind others that start at zero
    assert [backward(check, a=value, b=1.0) for value in (1e-6, 1.0, 1e6)] == [""] * 3
    assert "a (bucket 2) on rank [0]" in backward(check, a=2e8, b=1.0)


def test_growth_by_small_factors_never_ends_and_is_no_alarm() -> None:
    check = make()
    assert [backward(check, a=1e-30 * 50.0**step) for step in range(38)] == [""] * 38


def test_infinity_counts_as_large_and_is_never_remembered_and_nan_is_left_to_the_other_check() -> None:
    check = make()
    assert backward(check, a=math.inf) == ""
    for _ in range(3):
        assert backward(check, a=1.0, b=3e38) == ""
    assert backward(check, a=math.nan, b=math.nan) == ""
    assert "a (bucket 2) on rank [0] has inf, and had at most 1 in 3 backwards" in backward(check, a=math.inf)
    assert "b on rank [0] has inf, and had at most 3e+38 in 3 backwards" in backward(check, b=math.inf)
    assert "has 101," in backward(check, a=101.0)


def test_several_gradients_of_one_backward_count_by_their_largest() -> None:
    check = make()
    for _ in range(3):
        backward(check, a=1.0)
    check.begin()
    for value in (1.0, 300.0, 2.0):
        check.record("a", torch.tensor(value, dtype=torch.bfloat16))
    check.record("b", torch.zeros(0, 4))
    with pytest.raises(LargeGradientError, match=r"a \(bucket 2\) on rank \[0\] has 300, and had at most 1 in 3"):
        check.conclude()


def test_a_backward_that_never_ended_is_forgotten() -> None:
    check = make()
    for _ in range(3):
        backward(check, a=1.0)
    check.begin()
    check.record("a", torch.tensor(1e9))
    assert backward(check, a=1.0) == ""
    assert "has 1000, and had at most 1 in 4 backwards" in backward(check, a=1000.0)


def test_the_host_waits_for_the_device_once_when_backward_ends() -> None:
    check = make()
    with OpCounts() as looking:
        check.begin()
        for name in "ab":
            check.record(name, torch.ones(3))
    with OpCounts() as concluding:
        check.conclude()
    assert looking.ops["linalg_vector_norm"] == 2
    assert looking.ops["_local_scalar_dense"] == 0
    assert concluding.ops["_local_scalar_dense"] + concluding.ops["is_nonzero"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_every_dtype_of_gradients_is_measured(dtype: torch.dtype) -> None:
    check = make(history=1)
    for value in (1.0, 256.0):
        check.begin()
        check.record("a", torch.tensor([[0.5, -value]], dtype=dtype))
        if value == 1.0:
            check.conclude()
    with pytest.raises(LargeGradientError, match="has 256, and had at most 1 in 1"):
        check.conclude()


@given(
    st.lists(st.tuples(*[st.sampled_from([0.0, 1.0, 8.0, 64.0, 512.0, math.inf, math.nan])] * 2), max_size=20),
    st.integers(1, 4),
)
def test_it_does_what_its_description_says(sequence: list[tuple[float, float]], history: int) -> None:
    check = make(factor=10.0, history=history)
    before: dict[str, list[float]] = {"a": [], "b": []}
    for values in sequence:
        found = dict(zip("ab", values, strict=True))
        large = {
            name
            for name, value in found.items()
            if len(before[name]) >= history and value > 10 * max(before[name])  # False for NaN
        }
        said = backward(check, **found)
        assert {name for name in "ab" if f"{name} " in said.partition("before: ")[2].partition(" (global")[0]} == large
        for name, value in found.items():
            if not large and 0.0 < value < math.inf:
                before[name].append(value)


@pytest.mark.parametrize(("factor", "history"), [(1.0, 3), (math.nan, 3), (100.0, 0)])
def test_a_factor_or_history_without_sense_is_refused(factor: float, history: int) -> None:
    with pytest.raises(ConfigurationError, match=f"factor={factor} and history={history}; factor has to be above 1"):
        make(factor, history)
