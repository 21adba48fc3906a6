import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.launch.crew import Start
from megatron_fsdp.train.launch.failures import (
    ENDS,
    Failure,
    HungError,
    find_cause,
    note_interruption,
    report_failure,
    write_failure,
)
from megatron_fsdp.train.launch.launcher import _asking, choose_ranks, find_device_type, is_rank, rank_environment
from tests.support.source_tree import ROOT


@pytest.mark.parametrize(
    ("requested", "num_accelerators", "num_cores", "expected"),
    [(None, 0, 2, 2), (None, 0, 1, 1), (None, 0, 64, 2), (3, 0, 2, 3), (None, 8, 64, 8), (2, 8, 64, 2)],
)
def test_ranks_fit_the_machine(requested: int | None, num_accelerators: int, num_cores: int, expected: int) -> None:
    assert choose_ranks(requested, num_accelerators=num_accelerators, num_cores=num_cores) == expected


def test_more_ranks_than_accelerators_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--nproc 3 needs as many accelerators and 2 are here"):
        choose_ranks(3, num_accelerators=2, num_cores=64)


def test_ranks_share_the_cores() -> None:
    assert rank_environment({}, ranks=2, num_cores=8)["OMP_NUM_THREADS"] == "4"
    assert rank_environment({}, ranks=4, num_cores=2)["OMP_NUM_THREADS"] == "1"


def test_environment_of_the_user_is_left_alone() -> None:
    given = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert rank_environment(given, ranks=2, num_cores=8) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface has another name elsewhere")
def test_traffic_stays_on_this_machine() -> None:
    added = rank_environment({}, ranks=2, num_cores=8)
    assert (added["GLOO_SOCKET_IFNAME"], added["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")


def test_ranks_are_told_what_torchrun_would_tell_them_and_a_new_file_for_each_start(tmp_path: Path) -> None:
    first, second = (Start(("x",), 3, "20260101-120000", restart, 2, tmp_path).environment(1) for restart in (0, 1))
    assert {name: first[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
    }
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_ERROR_FILE",
        "MEGATRON_FSDP_STORE_FILE",
        "MEGATRON_FSDP_INTERRUPTED_FILE",
    }
    assert first["MEGATRON_FSDP_LAUNCHER_PID"] == str(os.getpid())
    assert "MASTER_PORT" not in first


def test_a_rank_is_known_by_the_environment_of_torchrun() -> None:
    assert is_rank({"RANK": "0", "WORLD_SIZE": "1"})
    assert not is_rank({"PATH": "x"})


def test_cpu_is_always_a_device() -> None:
    assert find_device_type("cpu") == "cpu"


def test_missing_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    assert find_device_type("auto") == "cpu"
    with pytest.raises(ConfigurationError, match="--device cuda is not available here: use --device cpu"):
        find_device_type("cuda")


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


def test_wrong_setting_is_one_line(tmp_path: Path) -> None:
    write_failure(raised(ConfigurationError("no text")), tmp_path / "0.json")
    cause = find_cause({0: failed(0, tmp_path / "0.json")})
    assert (cause.text, cause.code, cause.is_worth_repeating) == ("no text", 2, False)


def test_killed_rank_is_the_cause_and_its_peers_are_echoes(tmp_path: Path) -> None:
    write_failure(raised(RuntimeError("connection closed by peer")), tmp_path / "0.json")
    failures = {0: failed(0, tmp_path / "0.json"), 1: failed(1, tmp_path / "missing.json", exitcode=-9)}
    cause = find_cause(failures)
    words = "it was ended by SIGKILL, as after kill -9 or when the machine's memory runs out"
    assert cause == Failure(1, words, 7, cause.time_ns)
    assert cause.is_worth_repeating
    assert find_cause({0: failures[0]}).text.endswith("RuntimeError: connection closed by peer\n")


def test_what_only_one_thing_can_cause_comes_before_what_follows_from_it(tmp_path: Path) -> None:
    write_failure(raised(RuntimeError("connection closed by peer")), tmp_path / "0.json")
    write_failure(raised(HungError("rank 2 is away")), tmp_path / "1.json")
    aborted = failed(2, tmp_path / "missing.json", exitcode=-6)
    cause = find_cause({0: failed(0, tmp_path / "0.json"), 1: failed(1, tmp_path / "1.json"), 2: aborted})
    assert (cause.rank, cause.code, cause.text, cause.is_worth_repeating) == (1, 5, "rank 2 is away", True)


def test_every_exit_code_is_documented() -> None:
    told = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8")
    for code, meaning in ENDS.items():
        assert f"| {code} | {meaning} |" in told


def test_error_goes_to_the_file_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert report_failure(raised(ConfigurationError("no text")), rank=1) == 2
    assert report_failure(raised(OSError("disk")), rank=1) == 1
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "disk"


def test_exit_code_survives_where_the_error_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gone" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert report_failure(raised(HungError("rank 2 is away")), rank=1) == 5
    assert capsys.readouterr().err == "rank 1: rank 2 is away\n"
    cause = find_cause({0: failed(0, path, exitcode=1), 1: failed(1, path, exitcode=5)})
    assert (cause.rank, cause.code, cause.text) == (1, 5, "it ended with exit code 5 and without a word")


def test_half_an_error_file_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_disk(_: object, path: Path) -> None:
        path.write_text('{"mess')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_fsdp.train.launch.failures.write_failure", fill_disk)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert report_failure(raised(HungError("rank 2 is away")), rank=1) == 5
    assert list(tmp_path.iterdir()) == []


def test_without_torchrun_a_wrong_setting_is_shown_by_the_first_rank_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_failure(raised(ConfigurationError("no text")), rank=1)
    assert capsys.readouterr().err == ""
    report_failure(raised(ConfigurationError("no text")), rank=0)
    assert capsys.readouterr().err == "error: no text\n"


def test_torchrun_is_told_a_sentence_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("MEGATRON_FSDP_INTERRUPTED_FILE", raising=False)
    for error, shown in ((ConfigurationError("no text"), "error: no text\n"), (HungError("hung"), "rank 0: hung\n")):
        report_failure(raised(error), rank=0)
        assert capsys.readouterr().err == shown
        assert failed(0, tmp_path / "error.json").message["extraInfo"]["py_callstack"] == f"error: {error}"  # type: ignore[index]
    report_failure(raised(OSError("disk")), rank=0)
    assert capsys.readouterr().err == ""
    assert failed(0, tmp_path / "error.json").message["extraInfo"]["py_callstack"].startswith("Traceback")  # type: ignore[index]
    monkeypatch.setenv("MEGATRON_FSDP_INTERRUPTED_FILE", str(tmp_path / "interrupted"))  # our own launcher says it
    report_failure(raised(ConfigurationError("no text")), rank=0)
    assert capsys.readouterr().err == ""


def test_signals_that_are_ignored_at_the_start_stay_ignored() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT)}
    try:
        with _asking() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGINT)
            assert (asked.number, asked.times) == (0, 0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (asked.number, asked.exit_code) == (signal.SIGTERM, 143)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_word_of_an_interruption_is_left_where_a_launcher_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_FSDP_INTERRUPTED_FILE", raising=False)
    note_interruption()
    start = Start(("x",), 1, "r", 0, 0, tmp_path)
    monkeypatch.setenv("MEGATRON_FSDP_INTERRUPTED_FILE", start.environment(0)["MEGATRON_FSDP_INTERRUPTED_FILE"])
    note_interruption()
    assert list(tmp_path.iterdir()) == [start.interrupted_file]
