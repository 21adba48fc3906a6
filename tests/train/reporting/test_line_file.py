import errno
import os
from pathlib import Path

import pytest

from megatron_fsdp.train.reporting.writers.line_file import LineFile

FULL = Path("/dev/full")


def test_lines_are_added_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    assert file.keep(lambda _: True) is False
    file.append(["a\n", "b\n"])
    file.append(["c\n"])
    assert path.read_text() == "a\nb\nc\n"
    assert LineFile(path).keep(lambda line: line != "b\n") is True
    assert path.read_text() == "a\nc\n"
    assert LineFile(path).keep(lambda _: False) is False
    assert [found.name for found in tmp_path.iterdir()] == ["lines"]


def test_a_torn_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\nto")
    LineFile(path).keep(lambda _: True)
    assert path.read_bytes() == b"a\nb\n"


@pytest.mark.skipif(not FULL.exists(), reason="this system has no full device")
def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.symlink_to(FULL)
    file = LineFile(path)
    for line in ("a\n", "b\n"):
        with pytest.raises(OSError, match="No space left"):
            file.append([line])
    assert file.has_waiting
    path.unlink()  # there is room again
    file.append(["c\n"])
    assert path.read_text() == "a\nb\nc\n"
    assert not file.has_waiting


def test_half_a_line_is_taken_off_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_text("a\n")
    opened = Path.open

    class Half:
        """Writes three bytes and then finds the disk full."""

        def __init__(self) -> None:
            self.file = opened(path, "ab", buffering=0)

        def __enter__(self) -> "Half":
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def tell(self) -> int:
            return self.file.tell()

        def fileno(self) -> int:
            return self.file.fileno()

        def write(self, text: bytes) -> int:
            if self.file.tell() > 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(text[:3])

    file = LineFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_, **__: Half())
        with pytest.raises(OSError, match="No space left"):
            file.append(["long line\n"])
    assert path.read_text() == "a\n"
    file.append(["b\n"])
    assert path.read_text() == "a\nlong line\nb\n"
