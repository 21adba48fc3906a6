"""What was measured of a run is what the planner says of it."""

import numpy as np
import pytest
import torch

from megatron_fsdp.plan.sharded import optimizer_bytes as planned_optimizer_bytes
from megatron_fsdp.train.loop import Run, train
from megatron_fsdp.train.measure import Speed, optimizer_bytes
from megatron_fsdp.train.models.trained import build
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import World, resolve
from megatron_fsdp.train.planned import as_planned, compare, rows_told
from tests.support.array_tokens import feed_of, token_data
from tests.support.on_ranks import on_ranks
from tests.support.train_program import this_rank
from tests.train.models.runs import NoCheckpoints, Silent

TINY = ("--preset", "tiny", "--seq-length", "16")
OUTER = ("--num-distributed-optimizer-instances", "2", "--outer-dp-sharding-strategy", "optim")


@pytest.mark.parametrize("kind", ["adam", "adamw8bit", "muon", "sgd", "sgd --sgd-momentum 0"])
@on_ranks(2)
def test_the_formula_of_optimizer_state_is_that_of_the_optimizer_to_the_byte(kind: str) -> None:
    job = resolve(parse_options([*TINY, "--optimizer", *kind.split()]), World(2, "cpu"))
    built = build(job, 256, this_rank())
    assert built.inside is not None
    for param in built.model.parameters():
        param.grad = torch.zeros_like(param)
    assert optimizer_bytes(built.optimizer) == 0
    built.optimizer.step()
    planned = as_planned(built.inside, job, defers=built.defers)
    assert planned_optimizer_bytes(planned) == optimizer_bytes(built.optimizer)
    assert (optimizer_bytes(built.optimizer) == 0) == (kind == "sgd --sgd-momentum 0")


@pytest.mark.parametrize("flags", [(), OUTER], ids=["one axis", "two axes"])
@on_ranks(4)
def test_a_step_sends_and_holds_what_is_planned(flags: tuple[str, ...]) -> None:
    rank = this_rank()
    job = resolve(parse_options([*TINY, "--train-iters", "3", *flags]), World(rank.count, "cpu"))
    tokens = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16)
    data = token_data(tokens, tokens[:400])
    built = build(job, data.vocab_size, rank)
    run = Run(job, built, data, feed_of(data, job, built.data_index), rank, Speed(job.tokens_per_step))
    _, _, traffic = train(run, Silent(), NoCheckpoints())
    rows = compare(built, traffic, job)
    assert [row.what.partition(" ")[0] for row in rows] == ["gathers", "bytes", "peak"]
    assert [row.measured for row in rows] == [row.planned for row in rows]
    assert f"{rows[1].measured:,}" in rows_told(rows)
    assert compare(built, None, job) == ()
    assert rows_told(()) == ""
