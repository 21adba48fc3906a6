"""A random model that one door saves under one random arrangement, and that one door loads under another."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from tests.fuzzing.case import SAMPLES, Case, cases_of, draw_case, draw_program
from tests.fuzzing.doors import DOORS
from tests.fuzzing.model import batch
from tests.fuzzing.run import Ranks, loss_of, whole
from tests.support.dcp_contents import load_state, same, state_of

_OUTPUT = "output"  # not of tensor-parallel ranks, which add up parts of it


def draw_pair(seed: int, max_ranks: int = 4) -> tuple[Case, Case]:
    """A model under two arrangements; tensor parallelism only where the model is made for it."""
    rng, program = random.Random(seed + 3_000_017), draw_program(seed, max_ranks)
    candidates = (draw_case(other, max_ranks) for other in range(seed * 1000 + 1, seed * 1000 + 1000))
    other = next(case for case in candidates if program.mesh.tensor or not case.mesh.tensor)
    arranged = replace(
        program,
        mesh=other.mesh,
        strategy=other.strategy,
        outer_strategy=other.outer_strategy,
        wrap=other.wrap,
        options=other.options,
    )
    return rng.choice(cases_of(program, rng)), rng.choice(cases_of(arranged, rng))


def save_on_rank(case: Case, folder: str, plainly: bool) -> dict[str, Tensor]:
    """For a worker: train two steps, save, and return what the model and the optimizer hold."""
    side = DOORS[case.door](case)
    for step in range(2):
        inputs, targets = batch(case, step, 0, SAMPLES)
        with side.sync(last=True):
            for x, y in zip(side.parts(inputs), side.parts(targets), strict=True):
                (loss_of(case, side.model, x, y) * case.microbatches).backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
    if plainly:
        dcp.save(state_of(side.model, side.optimizer), checkpoint_id=folder)
    else:
        save_checkpoint(side.model, side.optimizer, folder, iteration=1)
    return _held(side)


def load_on_rank(case: Case, folder: str, plainly: bool) -> dict[str, Tensor]:
    """For a worker: load into a new model and a new optimizer, and return what they hold."""
    side = DOORS[case.door](case)
    with torch.no_grad():
        for param in side.model.parameters():
            param.fill_(-7.0)
    if plainly:
        load_state(side.model, side.optimizer, folder)
    else:
        load_checkpoint(side.model, side.optimizer, folder, with_rng=False)
    return _held(side)


def saved_plainly(saved: Case, loaded: Case) -> bool:
    """Whether to save by torch's functions alone, for which both doors have to give the same names."""
    return saved.seed % 2 == 0 and {saved.door, loaded.door} <= {"wrapper", "buckets"}


def differing(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """The names of what is not the same bit for bit; of states that were not saved, of those that are not blank."""
    told = [name for name in wanted if (name in found or name != _OUTPUT) and not same(wanted[name], found.get(name))]
    return told + [name for name in found.keys() - {*wanted, _OUTPUT} if found[name].any()]


def _held(side: Ranks) -> dict[str, Tensor]:
    """Weights and states, whole, and what the weights compute."""
    # Copies, as on one rank the whole of a parameter shares its memory, which the first forward may cut again.
    found = {name: value.clone() for name, value in side.parameters().items() if value is not None}
    for name, param in side.model.named_parameters():
        for kind, value in side.optimizer.state.get(param, {}).items():
            found[f"{name.removeprefix('module.')} {kind}"] = whole(value)
    with torch.no_grad():
        output = side.model(batch(side.case, 99, 0, 2)[0])
    if not side.case.mesh.tensor:
        found[_OUTPUT] = output
    return {name: value.detach().clone() for name, value in found.items() if value is not None}
