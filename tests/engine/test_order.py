"""A recorded order foretells what the last pass needed, for as long as the pass keeps to it."""

from megatron_fsdp.engine.schedule import RecordedOrder, StepLength


def record(order: RecordedOrder, *units: int) -> None:
    """One whole pass."""
    order.begin()
    for unit in units:
        order.note(unit)
    order.end()


def test_the_first_pass_foretells_nothing() -> None:
    order = RecordedOrder()
    order.begin()
    order.note(0)
    assert order.upcoming(3) == ()


def test_a_repeated_pass_foretells_the_next_units_nearest_first() -> None:
    order = RecordedOrder()
    record(order, 0, 1, 2, 3)
    order.begin()
    assert order.upcoming(1) == ()  # nothing was needed yet
    order.note(0)
    assert order.upcoming(2) == (1, 2)
    order.note(1)
    assert order.upcoming(9) == (2, 3)
    order.note(2)
    order.note(3)
    assert order.upcoming(1) == ()


def test_nothing_is_asked_for_at_depth_zero() -> None:
    order = RecordedOrder()
    record(order, 0, 1)
    order.begin()
    order.note(0)
    assert order.upcoming(0) == ()


def test_a_unit_needed_twice_in_a_row_counts_once() -> None:
    order = RecordedOrder()
    record(order, 0, 1, 1, 2)
    order.begin()
    order.note(0)
    order.note(1)
    assert order.upcoming(1) == (2,)
    order.note(1)
    assert order.upcoming(1) == (2,)


def test_a_unit_needed_again_later_counts_twice() -> None:
    order = RecordedOrder()
    record(order, 1, 2, 1)
    order.begin()
    order.note(1)
    order.note(2)
    assert order.upcoming(1) == (1,)


def test_a_pass_that_leaves_the_order_foretells_nothing_until_it_ends() -> None:
    order = RecordedOrder()
    record(order, 0, 1, 2)
    order.begin()
    order.note(0)
    order.note(2)
    assert order.upcoming(1) == ()
    order.note(2)
    order.note(1)
    assert order.upcoming(1) == ()


def test_the_order_that_was_taken_is_the_one_expected_next() -> None:
    order = RecordedOrder()
    record(order, 0, 1, 2)
    record(order, 0, 2, 1)
    order.begin()
    order.note(0)
    assert order.upcoming(2) == (2, 1)


def test_a_pass_longer_than_the_recorded_one_foretells_nothing_beyond_it() -> None:
    order = RecordedOrder()
    record(order, 0, 1)
    order.begin()
    for unit in (0, 1, 2):
        order.note(unit)
    assert order.upcoming(1) == ()


def test_a_pass_that_is_broken_off_leaves_the_recorded_order() -> None:
    order = RecordedOrder()
    record(order, 0, 1, 2)
    order.begin()
    order.note(5)
    order.begin()
    order.note(0)
    assert order.upcoming(2) == (1, 2)


def lasts(length: StepLength, *steps: int) -> list[list[bool]]:
    """What is foretold after each backward of steps with so many backwards."""
    found = []
    for backwards in steps:
        found.append([length.note_backward() for _ in range(backwards)])
        length.note_step()
    return found


def test_the_last_backward_of_a_step_is_foretold_by_the_step_before() -> None:
    assert lasts(StepLength(), 2, 2, 1, 3) == [[False, False], [False, True], [False], [True, False, False]]


def test_new_weights_without_a_backward_are_no_step() -> None:
    length = StepLength()
    assert lasts(length, 2, 0, 0, 2) == [[False, False], [], [], [False, True]]
