"""How much of a step's time communication was waited for, measured in some steps by a recording of `trace`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.trace.recorder import Recorder
from megatron_fsdp.trace.summary import summarise
from megatron_fsdp.train.engines.trained import Trained


class ExposedCommunication:
    """Records a step now and then; nothing where the engine cannot be observed."""

    def __init__(self, trained: Trained, *, is_wanted: bool) -> None:
        """Measure a model's communication, if it is wanted."""
        self._model = trained.inside if is_wanted else None
        self._device = trained.device
        self._recorder: Recorder | None = None
        self._step_s = math.nan

    @contextmanager
    def step(self, *, is_measured: bool) -> Iterator[None]:
        """Record what runs inside, where that is asked for; it computes the same bits."""
        if self._model is None or not is_measured:
            yield
            return
        recorder = Recorder(self._model, steps=2, align=False, memory=False)
        recorder.start()
        started_s = time.perf_counter()
        try:
            yield
        finally:
            recorder.stop()
        self._recorder, self._step_s = recorder, time.perf_counter() - started_s

    def take_share(self) -> float:
        """Exposed communication over the time of the step that was recorded last, as a mean over ranks; collective.

        Exposed is the time in which communication was in flight and this rank did nothing but wait for it or, on a CPU,
        launch it (`megatron_fsdp.trace.summary.hidden_part`).

        Returns:
            From 0 to 1; NaN where nothing was recorded since the last call.
        """
        if self._recorder is None:
            return math.nan
        exposed_ns = sum(step.exposed_ns for step in summarise(self._recorder.result()).steps)
        self._recorder = None
        share = Tensor([exposed_ns / 1e9 / self._step_s]).to(self._device)
        dist.all_reduce(share)
        return float(share) / dist.get_world_size()
