"""The learning rate over the steps: its ends, its shape, and what is refused."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.train.options.job import Schedule
from tests.support.train_program import job_of_words

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
FALLING = ("linear", "cosine", "WSD")


@st.composite
def schedules(draw: st.DrawFn, styles: tuple[str, ...] = STYLES) -> Schedule:
    style = draw(st.sampled_from(styles))
    decay = draw(st.integers(2, 200))
    warmup = draw(st.integers(0, decay - 1))
    wsd = draw(st.integers(1, max(1, decay - warmup))) if style == "WSD" else 0
    peak = draw(st.floats(1e-6, 10.0))
    return Schedule(peak, peak * draw(st.floats(0.0, 1.0)), style, warmup, decay, wsd)


@given(schedules())
def test_warmup_rises_evenly_and_its_last_step_has_the_peak(schedule: Schedule) -> None:
    rates = [schedule.rate(step) for step in range(schedule.warmup_steps)]
    assert all(0 < earlier < later for earlier, later in pairwise(rates))
    assert [rate / schedule.peak for rate in rates] == pytest.approx(
        [(step + 1) / schedule.warmup_steps for step in range(schedule.warmup_steps)]
    )
    if rates:
        assert rates[-1] == pytest.approx(schedule.peak)


@given(schedules())
def test_the_rate_never_rises_after_the_warmup_and_stays_between_its_ends(schedule: Schedule) -> None:
    rates = [schedule.rate(step) for step in range(schedule.warmup_steps, schedule.decay_steps + 3)]
    slack = 1e-12 * schedule.peak
    assert all(later <= earlier + slack for earlier, later in pairwise(rates))
    assert all(schedule.final - slack <= rate <= schedule.peak + slack for rate in rates)


@given(schedules(FALLING))
def test_the_last_step_of_the_decay_and_all_later_ones_have_the_final_rate(schedule: Schedule) -> None:
    if schedule.warmup_steps < schedule.decay_steps - 1:
        assert schedule.rate(schedule.decay_steps - 1) == pytest.approx(schedule.final)
    assert schedule.rate(schedule.decay_steps) == schedule.final
    assert schedule.rate(10 * schedule.decay_steps) == schedule.final


def rates(schedule: Schedule) -> list[float]:
    return [schedule.rate(step) for step in range(schedule.decay_steps)]


def test_each_style_has_its_shape() -> None:
    values = rates(Schedule(2.0, 0.2, "cosine", 4, 24))[3:]
    assert all(later < earlier for earlier, later in pairwise(values))
    assert values[-1] == pytest.approx(0.2)
    assert values[10] == pytest.approx(1.1)  # half way between 2.0 and 0.2
    assert rates(Schedule(1.0, 0.0, "linear", 0, 4)) == pytest.approx([0.75, 0.5, 0.25, 0.0])
    root = Schedule(1.0, 0.1, "inverse-square-root", 4, 1000)
    assert root.rate(15) == pytest.approx(0.5)  # the square root of 4 over 16
    assert root.rate(998) == 0.1
    assert rates(Schedule(1.0, 0.0, "WSD", 2, 8, 4)) == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    risen = rates(Schedule(1.0, 0.0, "constant", 4, 6, initial=0.2))
    assert risen == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--lr 1 --min-lr 0.02 --lr-decay-style WSD --lr-decay-iters 24 --lr-warmup-iters 5 --lr-wsd-decay-iters 7",
            Schedule(1, 0.02, "WSD", 5, 24, 7),
        ),
        ("--train-iters 100 --lr-warmup-fraction 0.58", Schedule(3e-3, 3e-4, "cosine", 58, 100)),  # not rounded down
        (
            "--train-iters 9 --lr-warmup-init 1e-3 --lr-warmup-iters 4",
            Schedule(3e-3, 3e-4, "cosine", 4, 9, initial=1e-3),
        ),
        (
            "--train-samples 80 --lr-decay-style WSD --lr-wsd-decay-samples 20 --lr-decay-samples 60",
            Schedule(3e-3, 3e-4, "WSD", 1.5, 15, 5),
        ),
        ("--train-iters 29", Schedule(3e-3, 3e-4, "cosine", 2, 29)),  # a tenth, rounded down
    ],
)
def test_the_job_has_the_schedule_of_the_flags(words: str, expected: Schedule) -> None:
    assert job_of_words(f"--preset tiny {words}", 1).schedule == expected


def test_samples_say_what_steps_say_and_may_end_within_a_step() -> None:
    words = "--preset tiny --lr 0.2 --micro-batch-size 1 --global-batch-size 8"
    by_steps = f"{words} --train-iters 20 --lr-warmup-iters 4 --lr-decay-iters 16"
    by_samples = f"{words} --train-samples 160 --lr-warmup-samples 32 --lr-decay-samples 128"
    jobs = [job_of_words(line, 1) for line in (by_steps, by_samples)]
    assert jobs[0].schedule == jobs[1].schedule
    assert jobs[1].train_iters == 20
    job = job_of_words(f"{words} --lr-decay-style constant --train-samples 166 --lr-warmup-samples 20", 1)
    assert job.train_iters == 20
    assert [job.schedule.rate(step) for step in range(4)] == pytest.approx([0.2 * 8 / 20, 0.2 * 16 / 20, 0.2, 0.2])
