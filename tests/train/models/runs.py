"""Runs of the trainer's loop on ranks, and the same training as a plain loop in one process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.checkpoints import Origin, RunCheckpoints
from megatron_fsdp.train.data.tokens import Feed, TokenData
from megatron_fsdp.train.loop import Run, train
from megatron_fsdp.train.measure import Evaluation, Progress, Speed, StepRecord
from megatron_fsdp.train.models.build import model_shape, transformers_config
from megatron_fsdp.train.models.decoder import Decoder
from megatron_fsdp.train.models.trained import Trained, build, build_optimizer
from megatron_fsdp.train.options.checks import uses_transformers
from megatron_fsdp.train.options.command_line import Layer, assemble
from megatron_fsdp.train.options.job import Job, World, resolve
from megatron_fsdp.train.ranks import Rank
from tests.support.array_tokens import feed_of, token_data
from tests.support.on_ranks import of_ranks, refusal
from tests.support.train_program import this_rank

STEPS, LENGTH, IDS, MASKED_ID = 3, 8, 59, 7

DECODER: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "seq_length": LENGTH,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "make_vocab_size_divisible_by": 8,
    "init_method_std": 0.1,
    "micro_batch_size": 2,
    "global_batch_size": 5,
    "train_iters": STEPS,
    "lr": 1e-2,
    "adam_eps": 1e-3,
    "clip_grad": 0.5,
    "weight_decay": 0.1,
    "eval_iters": 1,
    "log_interval": 2,
}
SMALL_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
"""For configs of transformers."""
LLAMA: dict[str, Any] = {**DECODER, "transformer_impl": "transformers", "untie_embeddings_and_output_weights": True}
TIED: dict[str, Any] = {**LLAMA, "untie_embeddings_and_output_weights": False}
MIXTRAL: dict[str, Any] = {**LLAMA, "num_experts": 4, "moe_router_topk": 2}


@dataclass
class Results:
    """What a run came to, the same on every rank."""

    losses: list[float]
    norms: list[float]
    held_out: float
    weights: dict[str, Tensor]


class Silent:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []
        self.said: list[str] = []

    def start(self, progress: Progress) -> None:
        pass

    def on_steps(self, records: Sequence[StepRecord]) -> None:
        self.records.extend(records)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def say(self, text: str) -> None:
        self.said.append(text)


@dataclass
class NoCheckpoints:
    """A keeper that keeps nothing."""

    is_interrupted: bool = False
    owes_evaluation: bool = False
    progress: Progress = field(default_factory=Progress)

    def start(self) -> Progress:
        return self.progress

    def save(self, progress: Progress, *, owes_evaluation: bool = False) -> None:
        pass


def job_of(values: Mapping[str, Any], ranks: int) -> Job:
    return resolve(assemble((Layer("command line", dict(values)),)), World(ranks, "cpu"))


def some_data() -> TokenData:
    draw = np.random.default_rng(0)
    training, held_out = (draw.integers(IDS, size=size).astype(np.uint16) for size in (600, 90))
    return token_data(training, held_out)


def some_feed(job: Job, index: int) -> Feed:
    """With --eod-mask-loss, targets of one id do not count."""
    return feed_of(some_data(), job, index, MASKED_ID if job.options.data.eod_mask_loss else None)


def prepare(values: Mapping[str, Any]) -> Run:
    """Build everything on this rank."""
    rank = this_rank()
    job = job_of(values, rank.count)
    trained = build(job, IDS, rank)
    return run_of(job, trained, rank)


def run_of(job: Job, trained: Trained, rank: Rank) -> Run:
    feed = some_feed(job, trained.data_index)
    return Run(job, trained, some_data(), feed, rank, Speed(job.tokens_per_step))


def initial_weights(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return whole_weights(prepare(values).trained.model)


def refusal_of_building(values: Mapping[str, Any]) -> str:
    return refusal(prepare, values, error=ConfigurationError)


def train_here(values: Mapping[str, Any]) -> Results:
    """Train on ranks by the trainer's loop."""
    run, watcher = prepare(values), Silent()
    train(run, watcher, NoCheckpoints())
    return results_of(run, watcher)


def train_with_checkpoints(values: dict[str, Any]) -> Results:
    """Train on ranks, with the folders that the options name."""
    run, watcher = prepare(values), Silent()
    origin = Origin(run.job.options.checkpoint.load)
    keeper = RunCheckpoints(run.job, run.trained, run.data, origin, watcher.say)
    with keeper.until_saved():
        train(run, watcher, keeper)
    return results_of(run, watcher)


def results_of(run: Run, watcher: Silent) -> Results:
    return Results(
        [record.loss for record in watcher.records],
        [record.grad_norm for record in watcher.records],
        watcher.evaluations[-1].loss,
        whole_weights(run.trained.model),
    )


@torch.no_grad()
def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights by their name in the model as it was before it was sharded; collective."""
    if isinstance(model, MegatronFSDP):
        inner = dict(model.module.named_parameters())
        found = {name: whole(model.checkpoint_names.saved_view(name, param)) for name, param in inner.items()}
    else:
        found = {name: whole(param) for name, param in model.named_parameters()}
    return {name: value for theirs in of_ranks(found) for name, value in theirs.items()}


def whole(param: Tensor) -> Tensor:
    value = param.full_tensor() if isinstance(param, DTensor) else param
    return value.detach().float().clone()


def plain_model(job: Job) -> nn.Module:
    """The model of a job, built by its own constructor in this process."""
    torch.manual_seed(job.options.training.seed)
    if not uses_transformers(job.options.model):
        return Decoder(model_shape(job.options.model, IDS))
    import transformers

    return transformers.AutoModelForCausalLM.from_config(transformers_config(job.options.model, IDS))


@contextmanager
def kept_by_autograd(model: nn.Module) -> Iterator[list[int]]:
    """Numbers of elements of what autograd keeps in the block, but for parameters."""
    kept, known = list[int](), {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def plain_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    found = model(tokens)
    return found if isinstance(found, Tensor) else found.logits


def plain_steps(
    job: Job,
    params: Iterable[nn.Parameter | Tensor],
    logits_of: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    before_step: Callable[[int, torch.optim.Optimizer], None] = lambda *_: None,
    done: tuple[int, int] = (0, 0),
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a job's steps in this process: no engine, no ranks. `done`: steps and samples."""
    feed, params, losses, norms = some_feed(job, 0), list(params), list[float](), list[float]()
    for step in range(done[0], job.train_iters):
        batches = feed.batches(done[1] + (step - done[0]) * job.batch.total)
        total, count = torch.zeros(()), sum(batch.weights.sum() for batch in batches)
        for batch in batches:
            torch.manual_seed(batch.dropout_seed)
            logits = logits_of(batch.inputs).transpose(1, 2)
            each = functional.cross_entropy(logits, batch.targets, reduction="none") * batch.weights
            if job.options.training.calculate_per_token_loss:
                total = total + each.sum() / count
            else:
                total = total + (each.sum(1) / batch.weights.sum(1).clamp(min=1)).sum() / job.batch.total
        total.backward()
        norms.append(nn.utils.clip_grad_norm_(params, job.options.optimizer.clip_grad or float("inf")).item())
        for group in optimizer.param_groups:
            group["lr"] = job.schedule.rate(step)
        before_step(step, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, norms


def train_plainly(
    values: Mapping[str, Any],
    before_step: Callable[[int, torch.optim.Optimizer], None] = lambda *_: None,
    first: Mapping[str, Tensor] | None = None,
) -> Results:
    """The same training in this process, from the weights `first`, if some are given."""
    job = job_of(values, 1)
    model = plain_model(job)
    model.load_state_dict({**model.state_dict(), **(first or {})})
    optimizer = build_optimizer(model.train(), job.options.optimizer)
    steps = plain_steps(job, model.parameters(), partial(plain_logits, model), optimizer, before_step)
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return Results(*steps, plain_held_out(job, model), weights)


@torch.no_grad()
def plain_held_out(job: Job, model: nn.Module) -> float:
    """Mean loss over the first held-out samples, which are spaced evenly."""
    tokens = torch.from_numpy(some_data().held_out.open().astype(np.int64))
    available = (len(tokens) - 1) // LENGTH
    count = min(available, job.options.training.eval_iters * job.batch.total)
    samples = torch.stack([tokens[i * available // count * LENGTH :][: LENGTH + 1] for i in range(count)])
    logits = plain_logits(model.eval(), samples[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).item()


@cache
def _kept(values: tuple[tuple[str, Any], ...]) -> Results:
    return train_plainly(dict(values))


_OF_RANKS = "parallel_size|sequence_parallel|fsdp|distributed_optimizer|strategy|overlap|meta|recompute|micro"


def expected(values: Mapping[str, Any]) -> Results:
    """What any number of ranks has to come to; computed once for options that differ only in ranks and engines."""
    plain = {name: value for name, value in values.items() if not re.search(_OF_RANKS, name)}
    return _kept(tuple(sorted({**plain, "micro_batch_size": values["global_batch_size"]}.items())))


def assert_equal_to_one_process(
    found: Results, values: Mapping[str, Any], tolerance: float = 2e-5, plain: Results | None = None
) -> None:
    """Losses, norms, held-out loss and all weights are those of the plain loop."""
    plain = expected(values) if plain is None else plain
    torch.testing.assert_close(found.losses, plain.losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(found.norms, plain.norms, rtol=10 * tolerance, atol=0)
    torch.testing.assert_close(found.held_out, plain.held_out, rtol=tolerance, atol=0)
    assert found.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        torch.testing.assert_close(
            found.weights[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
