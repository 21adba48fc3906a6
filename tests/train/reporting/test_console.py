"""The console when nobody reads any more."""

import os

from megatron_fsdp.train.reporting.console import make_console


def test_a_reader_that_has_gone_ends_nothing() -> None:
    reading, writing = os.pipe()
    console = make_console(is_first=True)
    with os.fdopen(writing, "w") as pipe:
        console.file = pipe
        console.print("first")
        assert os.read(reading, 100) == b"first\n"
        os.close(reading)
        for _ in range(3):
            console.print("second")
        pipe.write("what others print")
        pipe.flush()
    assert console.quiet
