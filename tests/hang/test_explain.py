"""From logs to the odd rank, without a process: each rule of the explanation against logs made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fsdp.cli.main import main
from megatron_fsdp.comm.processes import Process, this_process
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.hang.explain import Kind, explain, state_of
from megatron_fsdp.hang.log_file import Logs, Mark, RankLog, Record, Ring, UnitFacts, Writer, file_name, fold

_SECOND = 10**9
_NOW = 1000 * _SECOND
_UNITS = tuple(UnitFacts(label, (f"{label}.weight",), 64) for label in ("(root)", "a", "b", "c"))


def _beat(time_ns: int, collective: int = -1, unit: int = 0, phase: Phase = Phase.FORWARD) -> Record:
    return Record(0, time_ns, 0, unit, phase, Mark.BEAT, collective=collective)


class Story:
    """The records of one rank, told in order; each event a millisecond after the last."""

    def __init__(self, start_s: float = 100.0) -> None:
        self.records: list[Record] = []
        self._count = self._hash = self._epoch = 0
        self._time_ns = int(start_s * _SECOND)
        self.step, self.back = 0, False

    def add(self, mark: Mark, phase: Phase, unit: int, num_bytes: int = 0) -> "Story":
        self._time_ns += 10**6
        if mark is Mark.RESET:
            self._count = self._hash = 0
            self._epoch += 1
        if mark is Mark.LAUNCHES:
            self._count += 1
            self._hash = fold(self._hash, phase, unit, num_bytes)
        place = len(self.records), self._time_ns, self.step, unit, phase, mark, self.back, self._epoch
        self.records.append(Record(*place, 0, num_bytes, self._count, self._hash))
        return self

    def gather(self, unit: int, num_bytes: int = 64) -> "Story":
        self.add(Mark.BEGINS, Phase.UNSHARD, unit).add(Mark.LAUNCHES, Phase.UNSHARD, unit, num_bytes)
        return self.add(Mark.ENDS, Phase.UNSHARD, unit)

    def meet(self, phase: Phase) -> "Story":
        """Begin what takes all ranks."""
        return self.add(Mark.BEGINS, phase, 0).add(Mark.LAUNCHES, phase, 0)

    def train(self, norm: bool = True) -> "Story":
        """A step of three gathers, with a norm at its end."""
        for unit in (0, 1, 2):
            self.gather(unit)
        if norm:
            self.meet(Phase.NORM).add(Mark.ENDS, Phase.NORM, 0)
        self.step += 1
        return self

    def wait(self, unit: int) -> "Story":
        return self.add(Mark.BEGINS, Phase.WAIT, unit)

    def log(self, rank: int, num_ranks: int = 2, *, alive: bool | None = True, beat: Record | None = None) -> RankLog:
        process = Process("host", 10 + rank)
        writer = Writer(rank, tuple(range(num_ranks)), 0, "run", 1, process, _UNITS)
        return RankLog(writer, tuple(self.records), beat=beat, alive=alive, read_ns=_NOW)


def told(kind: Kind, ranks: tuple[int, ...], *logs: RankLog) -> str:
    """Assert what is found, and return the explanation."""
    explanation = explain(Logs(logs), 10.0)
    assert [(finding.kind, finding.ranks) for finding in explanation.findings] == [(kind, ranks)]
    return str(explanation)


def test_ranks_that_wait_for_the_same_are_told_so() -> None:
    text = told(Kind.EQUAL, (), *(Story().gather(2).gather(1).wait(1).log(rank) for rank in range(2)))
    assert text.startswith("all ranks wait for the same, and all have come: the network is slow or broken")
    assert "each of ranks 0, 1 waits for the weights of a in the forward of step 0 (operation 2) since 900.0 s" in text


def test_a_wait_that_is_short_is_no_hang() -> None:
    text = told(Kind.NOTHING, (), Story(995.0).gather(1).wait(1).log(0), Story(995.0).log(1))
    assert text.startswith("no rank stands out\n")


def test_a_missing_log_is_named() -> None:
    text = told(Kind.MISSING, (1, 2), *(Story().gather(1).wait(1).log(rank, 4) for rank in (0, 3)))
    assert text.startswith("ranks 1, 2 left no log here: ")


def test_a_rank_on_another_machine_that_fell_silent_is_gone() -> None:
    waits = Story().gather(1).wait(1).log(0, alive=None, beat=_beat(_NOW))
    text = told(Kind.DIED, (1,), waits, Story().gather(1).log(1, alive=None, beat=_beat(101 * _SECOND)))
    assert text.startswith("rank 1 died without a word (process 11 on host), as after kill -9")
    text = told(Kind.ELSEWHERE, (1,), waits, Story().gather(1).log(1, alive=None, beat=_beat(_NOW - 60 * _SECOND)))
    assert text.splitlines()[0].endswith("since 840.0 s")
    assert text.splitlines()[1].startswith("after that rank 1 died without a word (process 11 on host), as after kill")


def test_of_a_job_that_was_killed_as_a_whole_the_hang_before_is_told_if_it_hung() -> None:
    """Signs of life say how long it hung; nobody died before the others."""
    waits = Story().gather(1).wait(1).log(0, alive=False, beat=_beat(_NOW))
    sleeps = Story().gather(1).log(1, alive=False, beat=_beat(_NOW - _SECOND // 2))
    text = told(Kind.ELSEWHERE, (1,), waits, sleeps)
    assert "rank 0 waits for the weights of a in the forward of step 0 (operation 1) since 900.0 s" in text
    both = [Story(999.0).gather(1).log(rank, alive=False, beat=_beat(_NOW)) for rank in range(2)]
    told(Kind.NOTHING, (), *both)


def test_an_error_of_its_own_comes_before_those_that_follow_from_it() -> None:
    fails = Story().gather(1).add(Mark.BEGINS, Phase.FORWARD, 1).add(Mark.FAILED, Phase.FORWARD, 1)
    follows = Story().gather(1).wait(1).add(Mark.FAILED, Phase.WAIT, 1)
    first = replace(fails.log(1, alive=False), words="ValueError: bad batch")
    text = told(Kind.RAISED, (1,), follows.log(0, alive=False), first)
    assert text.splitlines()[:2] == [
        "rank 1 raised an error while it computes the forward of a in the forward of step 0:",
        "  ValueError: bad batch",
    ]


def test_ranks_that_saw_communication_fail_did_not_start_it() -> None:
    """They end one after another, some of them while it is looked at."""
    follows = Story().gather(1).wait(1).add(Mark.FAILED, Phase.WAIT, 1)
    logs = [follows.log(0, 4, alive=False), Story().gather(1).log(1, 4, alive=False)]
    told(Kind.DIED, (1,), *logs, follows.log(2, 4), follows.log(3, 4, alive=False))
    told(Kind.ELSEWHERE, (1,), follows.log(0, alive=False), Story().gather(1).log(1))


_SIGTERM = 'Stack (most recent call first):\n  File "a.py", line 3 in load\n  File "a.py", line 9 in <module>\n'


def _timed_out(quiet_s: int) -> tuple[RankLog, RankLog]:
    """Rank 0 waited for rank 1 until the time limit of its group; then whoever started them ended rank 1."""
    waits = Story(1000.0 - quiet_s).gather(1).wait(1).add(Mark.FAILED, Phase.WAIT, 1)
    sleeps = Story(1000.0 - quiet_s).gather(1).log(1, alive=False, beat=_beat(_NOW))
    return waits.log(0, alive=False), sleeps


@pytest.mark.parametrize("quiet_s", [900, 4])
def test_a_rank_that_was_ended_because_it_stood_still_is_not_told_as_dead(quiet_s: int) -> None:
    """Also where the time limit was shorter than what is called a hang."""
    waits, sleeps = _timed_out(quiet_s)
    text = told(Kind.ELSEWHERE, (1,), waits, replace(sleeps, termination=_SIGTERM))
    last = "starts to gather the weights of a"
    assert text.splitlines()[:5] == [
        f"rank 1 runs code outside of the model (the last it did there: {last}, step 0) since {quiet_s}.0 s",
        "after that rank 1 was ended by SIGTERM (process 11 on host)",
        "when SIGTERM came it ran, innermost first:",
        '  File "a.py", line 3 in load',
        '  File "a.py", line 9 in <module>',
    ]
    assert "process SIGTERM\n" in text


def test_the_first_standstill_is_told_before_a_later_death() -> None:
    text = told(Kind.ELSEWHERE, (1,), *_timed_out(900))
    assert text.splitlines()[1] == (
        "after that rank 1 died without a word (process 11 on host), as after kill -9 or when memory runs out"
    )
    told(Kind.DIED, (1,), *_timed_out(4))  # may have been a slow step


def test_a_rank_that_waited_as_the_others_did_is_no_victim_of_its_own() -> None:
    """All had come, one gave up, and the rest was ended."""
    waits = Story(995.0).gather(1).wait(1)
    ended = replace(waits.log(1, alive=False, beat=_beat(_NOW)), termination=_SIGTERM)
    told(Kind.EQUAL, (), Story(995.0).gather(1).wait(1).add(Mark.FAILED, Phase.WAIT, 1).log(0, alive=False), ended)


def test_a_rank_that_was_ended_alone_is_told_so() -> None:
    waits, _ = _timed_out(900)
    ended = replace(Story(999.9).gather(1).log(1, alive=False), termination=_SIGTERM)
    text = told(Kind.DIED, (1,), waits, ended)
    assert text.startswith("rank 1 was ended by SIGTERM (process 11 on host); the last thing known: it runs code out")


def _backward() -> Story:
    story = Story().gather(1)
    story.back = True
    return story.add(Mark.BEGINS, Phase.BACKWARD, 2)


@pytest.mark.parametrize(
    ("story", "place"),
    [
        (
            _backward().add(Mark.ENDS, Phase.BACKWARD, 2).add(Mark.BEGINS, Phase.FINALISE, 0),
            "while it ends its backward in the backward of step 0",
        ),
        (_backward(), "while it computes the backward of b in the backward of step 0"),
        (_backward().add(Mark.ENDS, Phase.BACKWARD, 2), "outside of the model in step 0"),
        (Story().gather(1), "outside of the model in step 0"),
    ],
)
def test_an_error_is_told_with_its_place(story: Story, place: str) -> None:
    """Not that of the goodbye, which is said in no phase."""
    story.back = False
    dead = replace(story.add(Mark.GOODBYE, Phase.UNSHARD, 0).log(1, alive=False), words="ValueError: hook")
    text = told(Kind.RAISED, (1,), Story().gather(1).wait(1).log(0), dead)
    assert text.startswith(f"rank 1 raised an error {place}:\n  ValueError: hook\n")


@pytest.mark.parametrize(
    ("phase", "doing"),
    [(Phase.WHOLE, "puts whole tensors together"), (Phase.NORM, "waits for the norm of all gradients")],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("steps", [0, 2])
def test_what_one_rank_alone_asks_for_while_others_train_on_is_told_with_what_they_do(
    phase: Phase, doing: str, num_ranks: int, steps: int
) -> None:
    def story() -> Story:
        told = Story()
        for _ in range(steps):
            told.train()
        return told

    others = [story().gather(0).wait(0).log(rank, num_ranks) for rank in range(num_ranks) if rank != 1]
    odd = (0, 1) if num_ranks == 2 else (1,)  # of two, either may be wrong
    text = told(Kind.DIFFERENT, odd, *others, story().meet(phase).log(1, num_ranks))
    each = "rank 0" if num_ranks == 2 else "each of ranks 0, 2"
    place = f"(operation {4 * steps + 1}, in the forward of step {steps})"
    assert text.startswith(f"rank 1 {doing} where {each} starts to gather the weights of (root) (64 bytes) {place}\n")


def test_of_many_ranks_the_odd_ones_are_shown_first() -> None:
    waits = [Story().gather(1).wait(1).log(rank, 40) for rank in range(39)]
    text = told(Kind.ELSEWHERE, (39,), *waits, Story().gather(1).log(39, 40)).splitlines()
    assert text[0].startswith("rank 39 runs code outside of the model (")
    assert text[1].startswith("each of ranks 0-38 waits for the weights of a in the forward of step 0")
    assert text[3].startswith("  rank 39 (suspect): runs code outside")
    assert text[-1] == "  and 24 more"


def test_a_collective_that_an_accelerator_has_not_finished_counts_as_waiting() -> None:
    """The host has gone on, out of the model."""
    beat = _beat(_NOW, 3, 2, Phase.REDUCE)
    waits = Story().gather(1).log(0, beat=beat)
    state = state_of(waits)
    assert (state.waits, state.phase, state.unit) == (True, Phase.REDUCE, 2)
    overwritten = state_of(Story().add(Mark.ENDS, Phase.FORWARD, 0).gather(1).log(0))  # a phase that has no beginning
    assert (overwritten.waits, overwritten.count, overwritten.phase) == (False, 1, Phase.UNSHARD)
    told(Kind.ELSEWHERE, (1,), waits, Story().gather(1).log(1, beat=_beat(_NOW)))


def test_a_rank_that_was_reset_alone_is_named() -> None:
    reset = Story().gather(1).add(Mark.RESET, Phase.FORWARD, 0).gather(2)
    logs = [Story().gather(1).wait(1).log(0, 3), reset.log(1, 3), Story().gather(1).wait(1).log(2, 3)]
    text = told(Kind.RESET, (1,), *logs)
    assert text.startswith("rank 1 called reset() a different number of times than the other ranks")


def test_a_rank_that_is_behind_in_the_same_operations_is_told_so() -> None:
    logs = [Story().gather(1).gather(2).gather(3).wait(3).log(rank, 3) for rank in (0, 2)]
    text = told(Kind.BEHIND, (1,), *logs, Story().gather(1).gather(2).wait(2).log(1, 3))
    assert text.startswith("rank 1 is behind: it waits for the weights of b in the forward of step 0\n")


def test_a_difference_before_what_the_logs_hold_is_told_as_such() -> None:
    logs = []
    for rank, unit in enumerate((1, 3, 3)):
        log = Story().gather(unit).gather(2).gather(2).wait(2).log(rank, 3)
        logs.append(replace(log, records=log.records[3:]) if rank == 0 else log)
    text = told(Kind.DIFFERENT, (0,), *logs)
    assert text.startswith(
        "rank 0 did something else than ranks 1, 2 before operation 2, the first that all logs hold\n"
    )


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_says_that_nothing_is_odd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = Ring(tmp_path / file_name(0, 0), replace(Story().log(0, 1).writer, process=this_process()))
    ring.add(Mark.BEGINS, Phase.FORWARD)
    assert main(["hang", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["odd"], found["findings"]) == (False, [{"kind": "nothing", "ranks": [], "sentences": []}])
    assert found["ranks"][0]["doing"] == "computes the forward of (root) in the forward of step 0"
    assert found["ranks"][0]["process"] == "alive"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["nowhere"], "nowhere is not a folder"), (["."], "holds no log of a rank"), ([".", "--after", "0"], "--after=0")],
)
def test_the_command_refuses_what_it_cannot_read(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["hang", *arguments]) == 2
    assert told in capsys.readouterr().err
