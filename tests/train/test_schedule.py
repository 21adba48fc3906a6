from itertools import pairwise

import pytest
from megatron_fsdp.train.schedule import learning_rate_at


def rates(total_steps: int, warmup_steps: int) -> list[float]:
    return [
        learning_rate_at(step, peak=2.0, warmup_steps=warmup_steps, total_steps=total_steps)
        for step in range(total_steps)
    ]


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert rates(20, 4)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_cosine_falls_from_the_peak_to_a_tenth() -> None:
    values = rates(24, 4)[3:]
    assert all(later < earlier for earlier, later in pairwise(values))
    assert values[-1] == pytest.approx(0.2)
    assert values[10] == pytest.approx(1.1)  # half way between 2.0 and 0.2


def test_no_warm_up_starts_just_below_the_peak() -> None:
    assert 1.9 < rates(50, 0)[0] < 2.0
