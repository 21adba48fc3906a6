"""What ended a rank on its way to the person who started the run, over streams that may be closed, full, or unread."""

import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.failures import Failure, NotSavedError, find_cause, report_failure, write_failure


def failed(local_rank: int, path: Path, exitcode: int = 1) -> ProcessFailure:
    return ProcessFailure(local_rank=local_rank, pid=1, exitcode=exitcode, error_file=str(path))


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001  # only to give it a traceback
        return caught


def test_cause_is_the_first_error_and_not_its_echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = 1_700_000_000 * 10**9
    for rank, now_ns, error in [(0, second + 900, RuntimeError("connection closed")), (1, second + 100, KeyError("w"))]:
        monkeypatch.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
        write_failure(raised(error), tmp_path / f"{rank}.json")
    cause = find_cause({rank: failed(rank, tmp_path / f"{rank}.json") for rank in (0, 1)})
    assert (cause.rank, cause.code, cause.time_ns) == (1, 1, second + 100)
    assert cause.text.startswith("Traceback")
    assert cause.text.endswith("KeyError: 'w'\n")


def test_killed_rank_is_the_cause_and_its_peers_are_echoes(tmp_path: Path) -> None:
    write_failure(raised(RuntimeError("connection closed by peer")), tmp_path / "0.json")
    failures = {0: failed(0, tmp_path / "0.json"), 1: failed(1, tmp_path / "missing.json", exitcode=-9)}
    cause = find_cause(failures)
    words = "it was ended by SIGKILL, as after kill -9 or when the machine's memory runs out"
    assert cause == Failure(1, words, 7, cause.time_ns)
    assert find_cause({0: failures[0]}).text.endswith("RuntimeError: connection closed by peer\n")


def test_a_rank_that_the_agent_killed_is_no_cause(tmp_path: Path) -> None:
    write_failure(raised(RuntimeError("timed out; rank 1 runs code outside of the model")), tmp_path / "0.json")
    killed = failed(1, tmp_path / "missing.json", exitcode=-9)
    killed.timestamp = int(time.time()) + 30  # what is left to ranks that catch SIGTERM
    cause = find_cause({0: failed(0, tmp_path / "0.json"), 1: killed})
    assert (cause.rank, cause.code) == (0, 1)
    assert "rank 1 runs code outside of the model" in cause.text


def test_what_only_one_thing_can_cause_comes_before_what_follows_from_it(tmp_path: Path) -> None:
    write_failure(raised(RuntimeError("connection closed by peer")), tmp_path / "0.json")
    write_failure(raised(NotSavedError("no room")), tmp_path / "1.json")
    aborted = failed(2, tmp_path / "missing.json", exitcode=-6)
    cause = find_cause({0: failed(0, tmp_path / "0.json"), 1: failed(1, tmp_path / "1.json"), 2: aborted})
    assert (cause.rank, cause.code, cause.text) == (1, 6, "no room")


def test_exit_code_survives_where_the_error_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gone" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert report_failure(raised(NotSavedError("no room")), rank=1) == 6
    assert capsys.readouterr().err == "rank 1: no room\n"
    cause = find_cause({0: failed(0, path, exitcode=1), 1: failed(1, path, exitcode=6)})
    assert (cause.rank, cause.code, cause.text) == (1, 6, "it ended with exit code 6 and without a word")


def test_torchrun_is_told_a_sentence_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("MEGATRON_FSDP_MEETING", raising=False)
    for error, shown in ((ConfigurationError("no text"), "error: no text\n"), (NotSavedError("no"), "rank 0: no\n")):
        report_failure(raised(error), rank=0)
        assert capsys.readouterr().err == shown
        assert failed(0, tmp_path / "error.json").message["extraInfo"]["py_callstack"] == f"error: {error}"  # type: ignore[index]
    report_failure(raised(OSError("disk")), rank=0)
    assert capsys.readouterr().err == ""
    assert failed(0, tmp_path / "error.json").message["extraInfo"]["py_callstack"].startswith("Traceback")  # type: ignore[index]
    monkeypatch.setenv("MEGATRON_FSDP_MEETING", "file:///x")  # our own launcher says it
    report_failure(raised(ConfigurationError("no text")), rank=0)
    assert capsys.readouterr().err == ""


def test_wrong_setting_is_one_line(tmp_path: Path) -> None:
    write_failure(raised(ConfigurationError("no text")), tmp_path / "0.json")
    cause = find_cause({0: failed(0, tmp_path / "0.json")})
    assert (cause.text, cause.code) == ("no text", 2)
