"""A recording as plain data: phases, collectives and memory of one rank, on one clock.

Times are nanoseconds since the recording started. On the CPU they are those of the host. On CUDA they are those of the
device: of phases and waits when the compute stream got there, of collectives when their lane's stream did.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fsdp.engine.observer import Phase

OPTIMIZER = "optimizer"
BLOCKED = "blocked"
LOCAL_SUM = "local sum"

PHASES: tuple[str, ...] = (*(phase.value for phase in Phase), OPTIMIZER, BLOCKED, LOCAL_SUM)
"""Names of phases: the engine's own; the step of an optimizer; the wait for a collective; and the local work on
its result, which on the CPU the waiting thread does."""

GATHER, REDUCE = "gather", "reduce"
HOST, STREAM = "host", "stream"
LANES: tuple[str, ...] = ("gather", "reduce", "outer")

Interval = tuple[int, int]
"""Start and end, in nanoseconds."""


@dataclass(frozen=True)
class Span:
    """A phase on the compute side.

    Attributes:
        step: The step it began in.
        unit: Index of the unit; 0 for those of the whole model.
        phase: One of `PHASES`.
        start_ns: When it began.
        duration_ns: How long it took, with what is nested in it.
        depth: How many phases it is nested in.
        num_bytes: What this rank sends in the collectives that were launched in it and in nothing nested in it.
    """

    step: int
    unit: int
    phase: str
    start_ns: int
    duration_ns: int
    depth: int
    num_bytes: int

    @property
    def end_ns(self) -> int:
        """The time at which the phase ended."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Collective:
    """One launch on a lane that sent something. Times are None where the recording ended, or failed, before.

    Attributes:
        number: Counted on this rank.
        step: The step it was launched in.
        unit: The unit that it was launched for.
        purpose: "gather" or "reduce".
        axis: Name of the mesh dimension.
        lane: One of `LANES`.
        num_bytes: What this rank sends, as `megatron_fsdp.comm.axis` counts.
        launch_ns: It was about to be started.
        launched_ns: The back end had it.
        done_ns: The data had arrived: as the back end reports it to the host, else as the wait found it.
        arrived_ns: The wait for what was sent was over.
        wait_step: The step in which the compute side waited for it.
        wait_ns: The compute side began to wait.
        waited_ns: It went on, after the local work on the result.
    """

    number: int
    step: int
    unit: int
    purpose: str
    axis: str
    lane: str
    num_bytes: int
    launch_ns: int
    launched_ns: int
    done_ns: int | None
    arrived_ns: int | None
    wait_step: int | None
    wait_ns: int | None
    waited_ns: int | None

    @property
    def in_flight(self) -> Interval | None:
        """The interval from the launch until what was sent had arrived."""
        return None if self.done_ns is None else (self.launch_ns, max(self.launch_ns, self.done_ns))

    @property
    def launch(self) -> Interval:
        """The interval in which it was handed to the back end."""
        return self.launch_ns, self.launched_ns

    @property
    def blocked(self) -> Interval | None:
        """The interval in which the compute side waited for the data; empty where it had arrived before.

        What follows until `waited_ns` is local work.
        """
        if self.wait_ns is None or self.waited_ns is None or self.arrived_ns is None:
            return None
        return self.wait_ns, min(max(self.arrived_ns, self.wait_ns), self.waited_ns)


@dataclass(frozen=True)
class MemorySample:
    """Bytes in use when a forward, a backward or a reduction of a unit began."""

    step: int
    unit: int
    time_ns: int
    num_bytes: int


@dataclass(frozen=True)
class StepWindow:
    """The time from the first phase of a step to the first phase of the next one."""

    index: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Timeline:
    """One rank's recording.

    Attributes:
        rank: Its global rank.
        world_size: Ranks of the job.
        device: Type of the device.
        clock: "host", or "stream" where times are those of the device.
        units: Labels of all units.
        started_unix_ns: This host's wall clock when the recording started.
        is_aligned: Whether all ranks left a barrier at that moment, so that their times may be compared.
        is_cut: Whether some step had more to record than there was room for.
        recording: Name of the recording, which all its ranks share; empty where ranks were not aligned.
        peers: The ranks that recorded together; empty where ranks were not aligned.
        memory_kind: What the samples count: "allocated" on the device, or "held" by the engine.
        steps: Recorded steps.
        spans: By start; what contains stands before what it contains.
        collectives: By launch.
        memory: By time.
    """

    rank: int
    world_size: int
    device: str
    clock: str
    units: tuple[str, ...]
    started_unix_ns: int
    is_aligned: bool
    is_cut: bool
    recording: str
    peers: tuple[int, ...]
    memory_kind: str
    steps: tuple[StepWindow, ...]
    spans: tuple[Span, ...]
    collectives: tuple[Collective, ...]
    memory: tuple[MemorySample, ...]


TABLES: dict[str, type] = {"steps": StepWindow, "spans": Span, "collectives": Collective, "memory": MemorySample}
"""Fields of a `Timeline` that are rows of one class each."""
