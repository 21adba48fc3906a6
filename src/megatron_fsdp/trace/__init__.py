"""Timelines of training: when each unit computed and communicated, and what was hidden behind what."""

from megatron_fsdp.trace.files import chrome_events, read_timelines, write_chrome, write_timeline
from megatron_fsdp.trace.recorder import Recorder, trace
from megatron_fsdp.trace.summary import Comparison, Row, Summary, compare, summarise
from megatron_fsdp.trace.timeline import Collective, MemorySample, Span, StepWindow, Timeline

__all__ = [
    "Collective",
    "Comparison",
    "MemorySample",
    "Recorder",
    "Row",
    "Span",
    "StepWindow",
    "Summary",
    "Timeline",
    "chrome_events",
    "compare",
    "read_timelines",
    "summarise",
    "trace",
    "write_chrome",
    "write_timeline",
]
