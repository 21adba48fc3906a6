"""Timelines of training: compute and communication of each unit, and the share of communication that was hidden."""

from megatron_fsdp.trace.files import RankTrace, chrome_events, merge_traces, read_traces, write_timeline
from megatron_fsdp.trace.recorder import Recorder, trace
from megatron_fsdp.trace.summary import StepTimes, hidden_part, summarise
from megatron_fsdp.trace.timeline import Collective, MemorySample, Span, StepWindow, Timeline

__all__ = [
    "Collective",
    "MemorySample",
    "RankTrace",
    "Recorder",
    "Span",
    "StepTimes",
    "StepWindow",
    "Timeline",
    "chrome_events",
    "hidden_part",
    "merge_traces",
    "read_traces",
    "summarise",
    "trace",
    "write_timeline",
]
