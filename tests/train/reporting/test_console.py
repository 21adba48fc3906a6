"""The console when nobody reads any more, where what it prints cannot be written, and how it breaks lines."""

import io
import os

from rich.console import Console

from megatron_fsdp.train.reporting.console import make_console, print_message, show_header


class FullDisk(io.StringIO):
    """A file that is full until there is room."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().write(text)

    def flush(self) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")


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


def test_a_full_disk_ends_nothing_and_what_comes_later_is_written() -> None:
    console, file = make_console(is_first=True), FullDisk()
    console.file = file
    console.print("first")
    file.is_full = False
    console.print("second")
    assert file.getvalue() == "second\n"


def test_letters_that_the_output_has_not_are_replaced_and_frames_are_of_ascii() -> None:
    console, written = make_console(is_first=True), io.BytesIO()
    console.file = io.TextIOWrapper(written, encoding="ascii")
    show_header(console, [("text", "caf\N{LATIN SMALL LETTER E WITH ACUTE}")])
    lines = written.getvalue().decode("ascii").splitlines()
    assert lines[0].startswith("+-")
    assert "megatron_fsdp training" in lines[0]
    assert lines[1] == "| text  caf?".ljust(len(lines[0]) - 1) + "|"


def test_a_long_message_is_one_line_in_a_file_and_lines_of_words_on_a_terminal() -> None:
    message = " ".join(["No space left on device; training goes on"] * 5)
    for is_terminal, lines in ((False, 1), (True, 6)):
        text = io.StringIO()
        print_message(Console(file=text, width=40, force_terminal=is_terminal), message)
        assert " ".join(text.getvalue().split()) == message
        assert len(text.getvalue().splitlines()) == lines
