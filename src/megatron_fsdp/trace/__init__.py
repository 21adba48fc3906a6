"""Timelines of training: what every unit did when, what was hidden behind what, as data, JSON, a picture and a table."""

from megatron_fsdp.trace.chrome import chrome_events
from megatron_fsdp.trace.files import read_timelines, write_chrome, write_timeline
from megatron_fsdp.trace.recorder import Recorder, trace
from megatron_fsdp.trace.summary import Summary, summarise
from megatron_fsdp.trace.timeline import Collective, MemorySample, Span, StepWindow, Timeline

__all__ = [
    "Collective",
    "MemorySample",
    "Recorder",
    "Span",
    "StepWindow",
    "Summary",
    "Timeline",
    "chrome_events",
    "read_timelines",
    "summarise",
    "trace",
    "write_chrome",
    "write_timeline",
]
