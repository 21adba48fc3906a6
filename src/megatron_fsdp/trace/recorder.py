"""An observer that records a model: it appends a mark and a few words per event, and computes nothing."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function

from megatron_fsdp.comm.agreement import all_agree, gather_over
from megatron_fsdp.comm.collectives import Moment, make_clock
from megatron_fsdp.describe.model import memory_of
from megatron_fsdp.engine.engine import engine_of_model, ranks_of_model
from megatron_fsdp.engine.observer import Observer, Phase, close_phase
from megatron_fsdp.errors import ConfigurationError, TraceError
from megatron_fsdp.optim.chained import ChainedOptimizer
from megatron_fsdp.sharding.units import ROOT_UNIT
from megatron_fsdp.trace.timeline import (
    BEGIN,
    BROKEN,
    DONE,
    END,
    HOST,
    OPTIMIZER,
    STREAM,
    TOLD,
    Raw,
    StepLog,
    Timeline,
    Times,
    build_timeline,
)

MAX_RECORDS = 500_000
"""Records of one step; a model that only evaluates never ends one."""

# Tuples and names of their own: hashing a member of an enumeration, and looking it up, takes longer than all else here.
_OPENS_STEP = (Phase.UNSHARD, Phase.FORWARD, Phase.GATHER_OUTER)
_SAMPLES_MEMORY = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE)
_LAUNCH = (Moment.LAUNCHES, Moment.LAUNCHED)
_COPY, _FORWARD, _INSTALL = Phase.COPY, Phase.FORWARD, Phase.INSTALL

_profiler_runs: Callable[[], bool] = torch._C._autograd._profiler_enabled


class _Range(NamedTuple):
    """A phase as a range of torch's profiler, with a name such as "mfsdp/unshard layers.3"."""

    phase: Phase
    unit: int
    opened: record_function


class Recorder(Observer):
    """Records the phases, collectives and memory of a model on this rank, between `start` and `stop`.

    A step ends when main weights are installed; events from there to the next forward belong to it. While it records,
    torch's profiler sees phases as ranges, such as "mfsdp/unshard layers.3".

    The arguments are those of `trace`.

    Raises:
        ConfigurationError: `model` is not sharded, or `steps` is below 1.
    """

    def __init__(self, model: nn.Module, *, steps: int = 10, align: bool = True, memory: bool = True) -> None:
        self._engine = engine_of_model(model)
        if steps < 1:
            raise ConfigurationError(f"steps={steps} keeps nothing; give 1 or more")
        self._align = align
        self._clock = make_clock(self._engine.device)
        self._mark = self._clock.mark
        self._counters = tuple(self._engine.traffic_by_axis.values())
        self._memory = self._memory_reader() if memory else lambda: None
        self._steps: deque[StepLog] = deque(maxlen=steps)
        self._ranges: list[_Range] = []
        self._handles: list[Any] = []
        self._tells_done = self._clock.is_host
        self._was_used = self._was_installed = False
        self._times: Times | None = None  # once it has stopped
        self._recording, self._peers = "", tuple[int, ...]()

    # ---- start, stop, result ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to record; only once, and collective if ranks are aligned."""
        if self._steps:
            raise TraceError("this recording was started before; make another Recorder")
        if self._align:
            groups = self._engine.reaching_all
            names, peers = zip(*gather_over(groups, (uuid.uuid4().hex, dist.get_rank())), strict=True)
            # All ranks take the same one of their names.
            self._recording, self._peers = min(names), tuple(sorted(set(peers)))
            self._clock.settle()
            # Ranks pass the barrier with idle devices, so that their clocks begin together.
            for group in groups:
                if group is not None:
                    dist.barrier(group)
        self._clock.settle()
        self._started_unix_ns, self._started_host_ns = time.time_ns(), time.perf_counter_ns()
        self._open_step(0)
        self._handles = [
            register_optimizer_step_pre_hook(partial(self._note_optimizer, (BEGIN, None))),
            register_optimizer_step_post_hook(partial(self._note_optimizer, (END,))),
        ]
        self._engine.observers.add(self)

    def stop(self) -> None:
        """Stop recording and remove all hooks from the model."""
        if not self._steps or self._times is not None:  # it has not begun, or is over
            return
        self._engine.observers.remove(self)
        for handle in self._handles:
            handle.remove()
        self._close_ranges()
        self._times = self._read_clock()

    def __enter__(self) -> Recorder:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def result(self) -> Timeline:
        """Return the recording so far."""
        if not self._steps:
            raise TraceError("nothing was recorded; call start(), or use `with trace(model) as recording:`")
        engine, times = self._engine, self._times or self._read_clock()
        empty = Timeline(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=engine.device.type,
            clock=HOST if self._clock.is_host else STREAM,
            units=tuple(unit.label for unit in engine.units),
            started_unix_ns=self._started_unix_ns,
            is_aligned=self._align,
            is_cut=any(step.is_cut for step in self._steps),
            recording=self._recording,
            peers=self._peers,
            memory_kind="held" if self._clock.is_host else "allocated",
        )
        return build_timeline(list(self._steps), times, tuple(engine.traffic_by_axis), empty)

    def _read_clock(self) -> Times:
        """Read the clock now; times count back from the end, since the first steps may be dropped."""
        self._clock.settle()
        end = self._clock.mark()
        self._clock.settle()
        now_ns = end if self._clock.is_host else time.perf_counter_ns()
        return Times(self._clock, end, now_ns - self._started_host_ns)

    # ---- notifications of the model -----------------------------------------------------------------------------

    def begins(self, phase: Phase, unit: int) -> None:
        """Record the beginning of a phase."""
        memory = None if phase is _COPY else self._begin_phase(phase, unit)  # copies are the most frequent phase
        self._note((BEGIN, self._mark(), phase, unit, memory))
        if _profiler_runs():
            opened = record_function(f"mfsdp/{phase.value} {self._engine.units[unit].label}")
            opened.__enter__()
            self._ranges.append(_Range(phase, unit, opened))

    def ends(self, phase: Phase, unit: int) -> None:
        """Record the end of a phase."""
        for ended in reversed(close_phase(self._ranges, phase, unit) if self._ranges else ()):
            ended.opened.__exit__(None, None, None)
        self._note((END, self._mark(), phase, unit))
        if phase is _INSTALL:
            self._was_installed = self._was_used

    def fails(self, phase: Phase, unit: int, error: BaseException) -> None:  # noqa: ARG002
        """Record a failed forward, which took time; other failed phases are left out."""
        if phase is _FORWARD:
            self.ends(phase, unit)

    def communicates(self, number: int, moment: Moment, stream: str, work: dist.Work | None) -> None:
        """Record a moment of a collective, and ask the back end to report its end."""
        sent = None
        if moment in _LAUNCH:
            sent = tuple((c.gathers, c.reductions, c.gather_bytes, c.reduce_bytes) for c in self._counters)
        self._note((TOLD, self._mark(), number, moment, stream, sent))
        if work is not None and self._tells_done:
            self._ask(number, work)

    def forgets(self) -> None:
        """Record a reset of the model."""
        self._close_ranges()
        self._note((BROKEN, self._mark()))

    # ---- inside -------------------------------------------------------------------------------------------------

    def _close_ranges(self) -> None:
        while self._ranges:
            self._ranges.pop().opened.__exit__(None, None, None)

    def _open_step(self, index: int) -> None:
        step = StepLog(index, self._mark())
        self._steps.append(step)
        self._note: Callable[[Raw], None] = step.records.append
        self._was_used = self._was_installed = False

    def _begin_phase(self, phase: Phase, unit: int) -> int | None:
        """Begin a step if one is due, check for room, and return the memory in use if it is sampled."""
        if self._was_installed and phase in _OPENS_STEP:
            self._open_step(self._steps[-1].index + 1)
        if phase is _FORWARD:
            self._was_used = True
            if unit == ROOT_UNIT and len(self._steps[-1].records) >= MAX_RECORDS:
                self._steps[-1].is_cut = True
                self._note = lambda _record: None  # drops the rest of this step
        return self._memory() if phase in _SAMPLES_MEMORY else None

    def _ask(self, number: int, work: dist.Work) -> None:
        """Register a callback for the end of a collective; the host would see it only when it waits."""
        note = self._note  # called by a thread of the back end, from which appending to a list is safe
        try:
            work.get_future().add_done_callback(lambda _: note((DONE, time.perf_counter_ns(), number)))
        except (RuntimeError, NotImplementedError):
            self._tells_done = False  # this back end has no futures

    def _memory_reader(self) -> Callable[[], int | None]:
        """Return a function that reads the bytes in use: the device's, or the engine's on a CPU."""
        if self._clock.allocated_bytes() is not None:
            return self._clock.allocated_bytes
        at_rest, executor = memory_of(self._engine).persistent_bytes, self._engine.executor
        return lambda: at_rest + executor.held_bytes

    def _note_optimizer(self, record: tuple[Any, ...], optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        """Record the begin or end of an optimizer's step, if it steps this model's parameters."""
        chains = [each for each in self._engine.connected if isinstance(each, ChainedOptimizer)]
        if any(optimizer in chain.optimizers for chain in chains):
            return  # a part of the chain's step
        if self._engine.is_stepped_by(optimizer):
            kind, *rest = record
            self._note((kind, self._mark(), OPTIMIZER, ROOT_UNIT, *rest))


def trace(model: nn.Module, *, steps: int = 10, align: bool = True, memory: bool = True) -> Recorder:
    """Record a model while the block runs.

        with trace(model, steps=3) as recording:
            for batch in batches:
                train_step(batch)
        write_timeline("traces", recording.result())

    Args:
        model: A wrapper, or a model sharded in place.
        steps: How many steps to keep; of more, the last ones.
        align: Let all ranks of the model start together, so that their times may be compared; then all of them have to
            enter the block. False where only some do.
        memory: Note memory at every forward, backward and reduction of a unit.

    Returns:
        The recording; `result()` of it is there from the first step on, and after the block.

    Raises:
        ConfigurationError: As `Recorder`.
    """
    if not align:
        return Recorder(model, steps=steps, align=align, memory=memory)
    with all_agree("beginning a trace", ranks_of_model(model)):
        return Recorder(model, steps=steps, align=align, memory=memory)
