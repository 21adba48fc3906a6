"""A random model saved under one random arrangement and loaded under another."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp

from tests.fuzzing.case import SAMPLES, Case, draw_case
from tests.fuzzing.model import batch
from tests.fuzzing.run import Ranks, loss_of
from tests.support.case import whole_moments
from tests.support.dcp_contents import contents


def draw_pair(seed: int, max_ranks: int = 4) -> tuple[Case, Case]:
    """A model under two arrangements; tensor parallelism only where the model is made for it."""
    saved = draw_case(seed, max_ranks)
    candidates = (draw_case(other, max_ranks) for other in range(seed * 1000 + 1, seed * 1000 + 1000))
    other = next(case for case in candidates if saved.mesh.tensor or not case.mesh.tensor)
    loaded = replace(
        saved,
        mesh=other.mesh,
        strategy=other.strategy,
        outer_strategy=other.outer_strategy,
        wrap=other.wrap,
        options=other.options,
    )
    return saved, loaded


def save_on_rank(case: Case, folder: str) -> list[str]:
    """For a worker: train two steps, save, and compare what was written with what the model holds."""
    side = Ranks(case)
    for step in range(2):
        inputs, targets = batch(case, step, 0, SAMPLES)
        with side.sync(last=True):
            for x, y in zip(side.parts(inputs), side.parts(targets), strict=True):
                (loss_of(case, side.model, x, y) * case.microbatches).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
    dcp.save({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}, checkpoint_id=folder)
    return _differing(side, folder)


def load_on_rank(case: Case, source: str, target: str) -> list[str]:
    """For a worker: load into a new model and a new optimizer, compare, and save once more."""
    side = Ranks(case)
    with torch.no_grad():
        for param in side.sharded.parameters():
            param.fill_(-7.0)
    state = {"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=source)
    side.model.load_state_dict(state["model"])
    side.optimizer.load_state_dict(state["optimizer"])
    dcp.save({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}, checkpoint_id=target)
    return _differing(side, source)


def _differing(side: Ranks, folder: str) -> list[str]:
    """Weights and state that differ between a checkpoint and the whole tensors of the model."""
    saved = contents(folder)
    told = [name for name, value in side.parameters().items() if not _equal(saved.get(f"model.module.{name}"), value)]
    params = [param for group in side.optimizer.param_groups for param in group["params"]]
    numbers = {id(param): number for number, param in enumerate(params)}
    by_name = {name: numbers[key] for key, name in side.sharded._engine.sharded_names().items() if key in numbers}
    for name, kind, value in whole_moments(side.sharded, side.optimizer):
        if not _equal(saved.get(f"optimizer.state.{by_name[name]}.{kind}"), value):
            told.append(f"{name} {kind}")
    return told


def _equal(saved: object, value: torch.Tensor | None) -> bool:
    return isinstance(saved, torch.Tensor) and value is not None and torch.equal(saved, value.detach())
