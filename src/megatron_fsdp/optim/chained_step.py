"""Step the optimizers of a chain on sharded parameters, each in the way of its class, so that they fail together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import RankError
from megatron_fsdp.optim.chained import ChainedOptimizer
from megatron_fsdp.optim.whole_exchange import Ranks


class Step(Protocol):
    """The way in which the code of an optimizer's class is run on shards: on an object that stands in for it."""

    def stand_in(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the object for one step."""
        ...

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Take what the step has made, at once after it."""

    def hand_over(self) -> None:
        """Give the optimizer what a step has made and not given back, also after one that failed."""


class ChainedStep:
    """Steps the optimizers of a chain; they fail on all ranks together.

    A rank on which one fails steps the others all the same, as its peers do, which may wait for messages. Then ranks
    tell each other what has come of each optimizer, by one small gather.
    """

    def __init__(self, members: Sequence[tuple[torch.optim.Optimizer, Step]]) -> None:
        self._members = members
        self._met: list[Exception | None] = []  # in each optimizer, in the step that is running
        self._ranks: dict[DeviceMesh, Ranks] = {}

    def stand_in(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return a chain that has this object for its only optimizer."""
        made = object.__new__(ChainedOptimizer)
        made.__dict__ = {**optimizer.__dict__, "optimizers": (self,)}
        return made

    def step(self) -> None:
        """Step the optimizers one after another; what fails is kept for `finish`."""
        self._met = []
        for optimizer, way in self._members:
            try:
                made = way.stand_in(optimizer)
                type(made).step(made)  # with the hooks of the optimizer
                way.finish(optimizer)
            except RankError as error:  # on all ranks together
                self._met.append(error)
                return
            except Exception as error:  # noqa: BLE001 - see above
                self._met.append(error)
            else:
                self._met.append(None)

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ranks tell each other what has come of each optimizer; collective.

        Raises:
            RankError: On every rank, with the same message, where one has failed on a rank; says which ones stepped.
            Exception: What a rank without peers has met.
        """
        here = [None if error is None else f"{type(error).__name__}: {error}" for error in self._met]
        error = next(filter(None, self._met), None)
        names = [type(each).__name__ for each, _ in self._members]
        problem: str | None = None  # in an earlier mesh, passed on to the ranks of the next
        all_ranks = self._all_ranks(optimizer)
        for ranks in all_ranks:
            everyone = [(problem, here)] if ranks.group is None else gather_objects((problem, here), ranks.group)
            problem = next((told for told, _ in everyone if told), None) or _told(names, [met for _, met in everyone])
        if error is not None and all(ranks.group is None for ranks in all_ranks):
            raise error
        if problem is not None:
            raise RankError(problem) from error

    def hand_over(self) -> None:
        """Let each optimizer have what its step has made."""
        for _, way in self._members:
            way.hand_over()

    def _all_ranks(self, optimizer: torch.optim.Optimizer) -> list[Ranks]:
        """Return the ranks of all meshes, the most first, but for those that all belong to another mesh."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        meshes = dict.fromkeys(param.shard_frame.mesh for param in params if isinstance(param, UnevenDTensor))
        found: dict[frozenset[int], Ranks] = {}
        for mesh in sorted(meshes, key=lambda mesh: -mesh.size()):
            members = frozenset(mesh.mesh.flatten().tolist())
            if not any(members <= others for others in found):
                self._ranks[mesh] = found[members] = self._ranks.get(mesh) or Ranks(mesh)
        return list(found.values())


def _told(names: Sequence[str], everyone: Sequence[Sequence[str | None]]) -> str | None:
    """Say what has come of each optimizer of a chain; None where all have stepped.

    Args:
        names: Of the optimizers.
        everyone: What each rank has met in each of those that were begun.
    """
    told, met = [], list(zip(*everyone, strict=True))
    if not any(text for texts in met for text in texts):
        return None
    for name, texts in zip(names, met, strict=False):
        failed = [f"on rank {rank} ({text})" for rank, text in enumerate(texts) if text is not None]
        if len(failed) == len(texts) and len(set(texts)) == 1:
            failed = [f"on all ranks ({texts[0]})"]
        told.append(f"{name} failed {', '.join(failed)}" if failed else f"{name} stepped")
    told += [f"{name} was not begun" for name in names[len(met) :]]
    has_stepped = any(text is None for texts in met for text in texts)
    cure = "load a checkpoint before the next step" if has_stepped else "no weights were changed"
    return f"the step of a ChainedOptimizer failed: {'; '.join(told)}; {cure}"
