"""Embeddings and heads as units of their own: equal to one process, gathered no more often, never read silently."""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp.config.ddp_config import ShardingStrategy
from tests.conftest import RunRanks
from tests.engine.test_allocators import train_and_evaluate
from tests.support.case import FP32, ONE_RANK, Run, Scenario, Setting, check_strategies, shard, three_steps
from tests.support.formulas import footprints_of, step_traffic
from tests.support.on_ranks import assert_equal_tensors, engine_of, fixed_seed, on_ranks, refusal
from tests.support.zoo import Batch, ModelCase
from tools.pages import DOCS

# ---- small decoders with untied ends ---------------------------------------------------------------------------------

FEATURES, VOCABULARY, TOKENS = 8, 12, 5
BLOCKS = 3

Read = Callable[["EndsDecoder", Tensor, Tensor], Tensor]
"""(model, tokens, hidden states) -> logits."""


class Block(nn.Module):
    """A residual linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


@dataclass(frozen=True)
class Shape:
    """What a decoder does with its ends."""

    twice: bool = False
    recomputes: bool = False
    frozen: bool = False
    read: Read | None = None


class EndsDecoder(nn.Module):
    """Tokens (samples, tokens) in, logits (samples, tokens, vocabulary) out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY)
        self.head.requires_grad_(not shape.frozen)
        self.shape = shape

    def forward(self, tokens: Tensor) -> Tensor:
        x = self._call(self.tokens, tokens)
        if self.shape.twice:
            x = x + self.tokens(tokens.roll(1, dims=1))
        for block in self.blocks:
            x = self._call(block, x)
        x = self.norm(x)
        if self.shape.read is not None:
            return self.shape.read(self, tokens, x)
        logits = self._call(self.head, x)
        return logits + 0.5 * self.head(torch.sin(x)) if self.shape.twice else logits

    def _call(self, module: nn.Module, x: Tensor) -> Tensor:
        if not self.shape.recomputes:
            return module(x)
        return checkpoint(module, x, use_reentrant=False)


def ends_case(shape: Shape) -> ModelCase:
    """A decoder, its data and its loss; its units are to be found."""
    return ModelCase(partial(EndsDecoder, shape), make_batch, loss, ())


def make_batch(samples: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (samples, TOKENS + 1), generator=generator)
    return Batch(tokens[:, :-1], tokens[:, 1:])


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())


AUTOMATIC = (("fsdp_unit_modules", None),)
SETTINGS = tuple(Setting(strategy, options=AUTOMATIC) for strategy in (3, 2, 1, 0))
UNITS = ["", "tokens", "blocks.0", "blocks.1", "blocks.2", "head"]

CASES = {
    "plain": ends_case(Shape()),
    "frozen": ends_case(Shape(frozen=True)),
    "twice-recomputed": ends_case(Shape(twice=True, recomputes=True)),
}


def train(run: Run) -> None:
    if run.sharded is not None:
        engine = engine_of(run.sharded)
        # Small ends stay in the root where weights stay whole.
        are_whole = engine.options.strategy is ShardingStrategy.no_shard and dist.get_world_size() > 1
        units = [name for name in UNITS if not (are_whole and name in ("tokens", "head"))]
        assert [unit.name for unit in engine.units] == units
    train_and_evaluate(run)
    with run.no_sync():
        run.backward(20, 21)
    run.backward(22)
    with torch.inference_mode():
        run.loss(23)
    run.step()


@pytest.mark.unmerged
@pytest.mark.full(short=["twice-recomputed-3"])
@pytest.mark.parametrize(("name", "num_ranks"), list(zip(CASES, (1, 2, 3), strict=True)))
def test_ends_found_automatically_equal_one_process(run_ranks: RunRanks, num_ranks: int, name: str) -> None:
    tolerance = ONE_RANK if num_ranks == 1 else FP32
    settings = SETTINGS if num_ranks == 2 else SETTINGS[:1]
    check_strategies(run_ranks, num_ranks, Scenario(train, CASES[name]), settings, tolerance)


# ---- traffic and memory --------------------------------------------------------------------------------------------


@pytest.mark.unmerged
@pytest.mark.parametrize("microbatches", [1, 3])
@on_ranks(2)
def test_root_and_slots_are_freed_after_the_last_backward_and_nothing_is_gathered_more_often(microbatches: int) -> None:
    root, slots = 128, 2 * 384  # bytes, in blocks of 128: 16 elements; the 72 of a block and 96 of tokens, used last
    case = CASES["plain"]
    model, optimizer = shard(case.build())
    steps, held = [], []
    for _ in range(4):
        start = model.traffic()
        for index in range(microbatches):
            case.loss(model, case.make_batch(2, torch.Generator().manual_seed(index))).backward()
            held.append(model.memory().gathered_bytes)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(model.traffic().since(start))
    expected = step_traffic(footprints_of(model), ShardingStrategy.optim_grads_params, microbatches)
    steps = steps[1:]
    assert steps == [expected] * 3
    first = [root + slots] * microbatches  # nothing is known of the first step
    assert held == first + ([root + slots] * (microbatches - 1) + [0]) * 3


class Penalised(nn.Embedding):
    """An embedding whose output depends on its weights in another way, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.weight.square().mean()


@on_ranks(2)
def test_a_rank_without_data_gathers_a_container_of_an_embedding_as_others_do() -> None:
    """Rank 1 has no data for a unit that holds an embedding and is none: it gathers what rank 0 gathers."""
    model = CASES["plain"].build()
    model.tokens = nn.Sequential(model.tokens)
    sharded, optimizer = shard(model, fsdp_unit_modules=[nn.Sequential, Block], max_gathered_units=1)
    batch = CASES["plain"].make_batch(2, torch.Generator().manual_seed(0))
    for _ in range(2):
        loss = CASES["plain"].loss(sharded, batch) if dist.get_rank() == 0 else sharded.take_part()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.unmerged
@pytest.mark.parametrize(("kind", "gathers"), [(nn.Embedding, 8), (Penalised, 9)])
@on_ranks(2)
def test_an_embedding_is_gathered_for_backward_only_where_that_reads_it(kind: type[nn.Module], gathers: int) -> None:
    """Forward gathers six units; backward finds the head and the last block, and gathers two blocks."""
    case = CASES["plain"]
    model, plain = case.build(), case.build()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.tokens.__class__ = kind
    sharded, optimizer = shard(model)
    batch = case.make_batch(2, torch.Generator().manual_seed(0))
    for _ in range(3):
        sharded.zero_grad()
        optimizer.step()
        start = sharded.traffic()
        case.loss(sharded, batch).backward()
    assert sharded.traffic().since(start).gathers == gathers
    case.loss(plain, batch).backward()
    found = sharded.full_gradients()["tokens.weight"]
    torch.testing.assert_close(found, plain.tokens.weight.grad, rtol=1e-5, atol=1e-7)


# ---- weights that are read -----------------------------------------------------------------------------------------


def _linear(model: EndsDecoder, _tokens: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, model.head.weight)


def _embedding(model: EndsDecoder, tokens: Tensor, x: Tensor) -> Tensor:
    return model.head(x + F.embedding(tokens, model.tokens.weight))


def _told_in_the_page() -> str:
    """The sentence that docs/memory.md prints, of a head in a Decoder with the class Block."""
    found = re.search(r"^    (head.weight belongs .*?)\n\n", (DOCS / "memory.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return " ".join(found[1].split())


READERS: dict[str, tuple[Read, str]] = {
    "linear": (_linear, "head.weight"),
    "recomputed": (lambda m, t, x: checkpoint(_linear, m, t, x, use_reentrant=False), "head.weight"),
    "embedding": (_embedding, "tokens.weight"),
    # A single index, such as of a decoding step, looks like one number spread over a shape.
    "one row": (lambda m, t, x: m.head(x + F.embedding(t[:1, :1], m.tokens.weight).sum()), "tokens.weight"),
}


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks()
def test_a_weight_that_is_read_where_its_unit_does_not_run_is_refused_by_name(num_ranks: int, reader: str) -> None:
    """Then, with the head called, gradients are right after a reset."""
    read, parameter = READERS[reader]
    case = ends_case(Shape(read=read))
    with fixed_seed(0):
        plain = CASES["plain"].build()
    batches = [case.make_batch(2, torch.Generator().manual_seed(rank)) for rank in range(num_ranks)]
    for batch in batches:
        (case.loss(plain, batch) / num_ranks).backward()
    for strategy in (3, 1) if num_ranks == 2 and reader == "linear" else (3,):
        for grad in (True, False):
            model, _ = shard(case, fsdp_unit_modules=None, zero_dp_strategy=strategy)
            with torch.enable_grad() if grad else torch.inference_mode():
                message = refusal(case.loss, model, batches[dist.get_rank()])
            unit, reader_class = parameter.split(".")[0], type(model.module).__name__
            told = _told_in_the_page().replace("of Decoder:", f"of {reader_class}:").replace("head", unit)
            assert message.endswith(f"; {told}")
            gc.collect()  # torch 2.11 leaves its hooks of recomputation on until the frames of the error are gone
            model.reset()
            model.module.shape = Shape()  # which calls the head
            case.loss(model, batches[dist.get_rank()]).backward()
            wanted = {name: param.grad for name, param in plain.named_parameters()}
            assert_equal_tensors(model.full_gradients(), wanted, rtol=1e-5, atol=1e-6)


def test_the_remedy_of_the_message_works(run_ranks: RunRanks) -> None:
    options = (("fsdp_unit_modules", [Block]), ("disable_bucketing", True))
    for read in (_linear, _embedding):
        scenario = Scenario(three_steps, ends_case(Shape(read=read)))
        check_strategies(run_ranks, 2, scenario, (Setting(3, options=options), Setting(1, options=options)))
