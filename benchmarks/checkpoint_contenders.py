"""Who saves and loads: this library now and in the background, and torch.distributed.checkpoint by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from benchmarks.contenders import FSDP2, OURS, Contender, Setting, build_contender
from benchmarks.workloads import Microbatch
from megatron_fsdp.checkpoint import Checkpointer

OURS_NOW = "ours"
OURS_VERIFIED = "ours, verified"
OURS_BACKGROUND = "ours, in the background"
OURS_BY_TORCH = "our state dicts, dcp"
FSDP2_NAMED = "fsdp2, dcp"
FSDP2_RAW = "fsdp2, dcp, raw"
PEER = FSDP2_NAMED

_ITERATION = 1


class Saver(ABC):
    """One way to save a trained model with its optimizer, and to load it again.

    Attributes:
        job: Model and optimizer.
        folder: Where to save; all ranks share it.
    """

    resumes_fresh = True
    """Whether a load also works for an optimizer that has not stepped."""

    def __init__(self, job: Contender, folder: Path) -> None:
        self.job = job
        self.folder = folder

    @abstractmethod
    def save(self) -> None:
        """Save; returns when training may go on."""

    @abstractmethod
    def load(self) -> None:
        """Load what was saved."""

    def finish(self) -> None:  # noqa: B027  most have nothing to finish
        """Wait until what was saved is on the disk."""

    def close(self) -> None:  # noqa: B027
        """Let go of what is kept between saves."""


class OursSaver(Saver):
    """`Checkpointer`, which verifies, publishes and prunes."""

    def __init__(self, job: Contender, folder: Path, in_background: bool = False, verify: bool = False) -> None:
        super().__init__(job, folder)
        self._checkpoints = Checkpointer(folder, in_background=in_background)
        self._verify = verify

    def save(self) -> None:
        """As `Saver` says."""
        self._checkpoints.save(_ITERATION, self.job.model, self.job.optimizer, overwrite=True)

    def finish(self) -> None:
        """As `Saver` says."""
        self._checkpoints.wait()

    def load(self) -> None:
        """As `Saver` says."""
        report = self._checkpoints.load(self.job.model, self.job.optimizer, verify=self._verify)
        assert report.is_complete

    def close(self) -> None:
        """As `Saver` says."""
        self._checkpoints.close()


class NamedSaver(Saver):
    """torch's `get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict`: what its documentation tells to do."""

    def save(self) -> None:
        """As `Saver` says."""
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=self.folder)

    def load(self) -> None:
        """As `Saver` says."""
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=self.folder)
        set_state_dict(
            self.job.model, self.job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


class RawSaver(Saver):
    """`dcp.save` and `dcp.load` of the bare state dicts; the optimizer must have its state already."""

    resumes_fresh = False

    def _state(self) -> dict[str, object]:
        return {"model": self.job.model.state_dict(), "optimizer": self.job.optimizer.state_dict()}

    def save(self) -> None:
        """As `Saver` says."""
        dcp.save(self._state(), checkpoint_id=self.folder)

    def load(self) -> None:
        """As `Saver` says."""
        state = self._state()
        dcp.load(state, checkpoint_id=self.folder)
        self.job.model.load_state_dict(state["model"])
        self.job.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]


def build_savers(names: list[str], setting: Setting, batch: Microbatch, folder: Path) -> dict[str, Saver]:
    """Train one job of this library and one of FSDP2 for a step, and make every way to save them; collective."""
    ours, theirs = (_trained(name, setting, batch) for name in (OURS[3], FSDP2))
    makers = {
        OURS_NOW: lambda where: OursSaver(ours, where),
        OURS_VERIFIED: lambda where: OursSaver(ours, where, verify=True),
        OURS_BACKGROUND: lambda where: OursSaver(ours, where, in_background=True),
        OURS_BY_TORCH: lambda where: RawSaver(ours, where),
        FSDP2_NAMED: lambda where: NamedSaver(theirs, where),
        FSDP2_RAW: lambda where: RawSaver(theirs, where),
    }
    return {name: makers[name](folder / str(position)) for position, name in enumerate(names)}


def _trained(name: str, setting: Setting, batch: Microbatch) -> Contender:
    job = build_contender(name, setting)
    job.step([batch])
    return job


def local_values(job: Contender) -> dict[str, Tensor]:
    """This rank's elements of every weight and optimizer state; the live ones."""
    found = {}
    names = {id(param): name for name, param in job.model.named_parameters()}
    for name, value in job.model.state_dict().items():
        if isinstance(value, Tensor):
            found[f"model.{name}"] = _local(value)
    for param, slots in job.optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{names[id(param)]}.{slot}"] = _local(value)
    return found


def _local(value: Tensor) -> Tensor:
    return (value._local_tensor if isinstance(value, DTensor) else value).detach()


def forget(saver: Saver) -> None:
    """Make weights and optimizer state such that a load has to bring them back."""
    with torch.no_grad():
        for value in local_values(saver.job).values():
            value.fill_(torch.nan)
    if saver.resumes_fresh:
        saver.job.optimizer.state.clear()


def differences(job: Contender, expected: dict[str, Tensor]) -> list[str]:
    """Keys whose bits are not as expected."""
    found = local_values(job)
    wrong = sorted(found.keys() ^ expected.keys())
    return wrong + [key for key in found.keys() & expected.keys() if not torch.equal(found[key], expected[key])]
