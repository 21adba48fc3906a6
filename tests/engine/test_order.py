"""A recorded order foretells what the last pass needed, for as long as the pass keeps to it."""

from megatron_fsdp.engine.schedule import RecordedOrder, StepLength

# A whole pass each, then the units noted in the next pass, and at which depth which units are foretold.
FORETOLD: dict[str, tuple[list[list[int]], list[int], int, tuple[int, ...]]] = {
    "the first pass foretells nothing": ([], [0], 3, ()),
    "nothing was needed yet": ([[0, 1, 2, 3]], [], 1, ()),
    "the next units, nearest first": ([[0, 1, 2, 3]], [0], 2, (1, 2)),
    "no more than there are": ([[0, 1, 2, 3]], [0, 1], 9, (2, 3)),
    "nothing at the end": ([[0, 1, 2, 3]], [0, 1, 2, 3], 1, ()),
    "nothing at depth zero": ([[0, 1]], [0], 0, ()),
    "twice in a row counts once": ([[0, 1, 1, 2]], [0, 1], 1, (2,)),
    "also in this pass": ([[0, 1, 1, 2]], [0, 1, 1], 1, (2,)),
    "again later counts twice": ([[1, 2, 1]], [1, 2], 1, (1,)),
    "nothing where it left the order": ([[0, 1, 2]], [0, 2], 1, ()),
    "nor later in this pass": ([[0, 1, 2]], [0, 2, 2, 1], 1, ()),
    "the order that was taken is expected next": ([[0, 1, 2], [0, 2, 1]], [0], 2, (2, 1)),
    "nothing beyond the recorded pass": ([[0, 1]], [0, 1, 2], 1, ()),
}


def test_a_repeated_pass_foretells_the_next_units() -> None:
    for name, (passes, noted, depth, expected) in FORETOLD.items():
        order = RecordedOrder()
        for units in passes:
            order.begin()
            for unit in units:
                order.note(unit)
            order.end()
        order.begin()
        order.note(5)
        order.begin()  # a pass that is broken off leaves the recorded order
        for unit in noted:
            order.note(unit)
        assert order.upcoming(depth) == expected, name


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
