"""Random delays before, after and around communication, to show that no result depends on timing.

    with inject_delays(model, seed=1, up_to_s=0.002):
        train(model)

Each rank draws from a seed of its own, so that collectives, waits and computation meet in orders that an idle machine
never shows. On CUDA the streams of communication and of compute are delayed as well.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.comm.collectives import Moment
from megatron_fsdp.engine.observer import Observer, Phase

_MOMENTS = (Moment.LAUNCHES, Moment.LAUNCHED, Moment.WAITS)
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.INSTALL)
_CYCLES_PER_S = 1.5e9  # clock rate of a CUDA device, roughly


def hold_up(device: torch.device, host_s: float, device_s: float) -> None:
    """Sleep on the host, and on CUDA also delay what is queued next on the current stream, by about `device_s`."""
    time.sleep(host_s)
    if device.type == "cuda":
        torch.cuda._sleep(int(device_s * _CYCLES_PER_S))


class DelayObserver(Observer):
    """An observer that sleeps for random times, uniform up to `up_to_s` seconds; rank r draws from `seed + r`."""

    def __init__(self, seed: int, up_to_s: float, device: torch.device) -> None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._random = random.Random(seed + rank)
        self._up_to_s = up_to_s
        self._device = device
        self.count = 0  # delays so far

    def begins(self, phase: Phase, unit: int) -> None:  # noqa: ARG002
        """Delay compute."""
        if phase in _PHASES:
            self._delay()

    def communicates(self, number: int, moment: Moment, stream: str, work: dist.Work | None) -> None:  # noqa: ARG002
        """Delay a launch, what follows it, or a wait; at a launch the current stream is the communication stream."""
        if moment in _MOMENTS:
            self._delay()

    def _delay(self) -> None:
        self.count += 1
        hold_up(
            self._device, host_s=self._random.uniform(0, self._up_to_s), device_s=self._random.uniform(0, self._up_to_s)
        )


@contextmanager
def inject_delays(model: MegatronFSDP, seed: int, up_to_s: float) -> Iterator[DelayObserver]:
    """Delay a wrapped model inside the block, at random; yields the observer, which counts the delays.

    A step has some ten delays for each unit. Every rank is given the same seed.
    """
    observer = DelayObserver(seed, up_to_s, model.device)
    model.observe(observer)
    try:
        yield observer
    finally:
        model.stop_observing(observer)
