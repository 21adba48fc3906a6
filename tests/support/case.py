"""One training script, run sharded on several ranks and whole on one process, and compared by values.

A script is a module-level function of a `Run`. What it notes on the way (losses, gradients, weights) is what is
compared; the same lines run in both settings, so a test cannot compare two different loops.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.state.gathers import parts_of
from tests.support.arrangements import FLAT, Arrangement, Values
from tests.support.on_ranks import Test, assert_equal_tensors, fixed_seed
from tests.support.zoo import IGNORED, Batch, ModelCase

SAMPLES = 12
"""Samples of a whole batch: 1, 2, 3 and 4 ranks divide it."""

RunRanks = Callable[..., list[Any]]
OptimizerFn = Callable[[nn.Module], torch.optim.Optimizer]
Named = tuple[tuple[str, Any], ...]

_DEFAULT_POLICY = MixedPrecisionPolicy()


def whole_moments(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """State tensors of their parameter's shape, gathered: name of the parameter, key and tensor. Collective."""
    names = model._engine.sharded_names()
    for param, state in optimizer.state.items():
        for kind, value in state.items():
            if isinstance(value, DTensor) and value.shape == param.shape:
                yield names[id(param)], kind, value.full_tensor()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD: an update is a multiple of the gradient, which hides nothing and magnifies nothing."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def shard(
    model: nn.Module | ModelCase, optimizer: OptimizerFn = sgd, seed: int = 0, **options: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model, or that of a case in its units, with an optimizer of its own; as `fully_shard` is told."""
    if isinstance(model, ModelCase):
        options = {"fsdp_unit_modules": list(model.unit_classes), **options}
        with fixed_seed(seed):
            model = model.build()
    return fully_shard(model, optimizer(model), **options)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Scenario:
    """A script and what it trains."""

    script: Callable[["Run"], None]
    case: ModelCase
    optimizer: OptimizerFn = sgd


@dataclass(frozen=True)
class Setting:
    strategy: int
    policy: MixedPrecisionPolicy = _DEFAULT_POLICY
    one_call: bool = True  # model and optimizer by `fully_shard`, else each by its own function
    average_in_collective: bool = False
    auto_sync: bool = True
    outer_strategy: int = 0
    per_token: bool = False
    arrangement: Arrangement = FLAT
    options: Named = ()  # further arguments of `fully_shard` and `fully_shard_model`

    def shard(self, scenario: Scenario, model: nn.Module) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
        arguments = {
            **self.arrangement.arguments(),
            "fsdp_unit_modules": scenario.case.unit_classes,
            "zero_dp_strategy": self.strategy,
            "outer_dp_sharding_strategy": self.outer_strategy,
            "mixed_precision_policy": self.policy,
            "average_in_collective": self.average_in_collective,
            "calculate_per_token_loss": self.per_token,
            "sync_model_each_microbatch": self.auto_sync,
            **dict(self.options),
        }
        if self.one_call:
            return fully_shard(model, scenario.optimizer(model), **arguments)
        sharded = fully_shard_model(model, **arguments)
        return sharded, fully_shard_optimizer(scenario.optimizer(sharded))


@dataclass(frozen=True)
class InPlace:
    """A setting without a wrapper: `shard_all` is given the units of a model, inner ones first, and the model."""

    shard_all: Callable[..., object]
    arrangement: Arrangement = FLAT

    def shard(self, scenario: Scenario, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        units = [module for module in model.modules() if isinstance(module, scenario.case.unit_classes)]
        self.shard_all(*reversed(units), model)
        return model, scenario.optimizer(model)


Job = tuple[Scenario, Any]
"""What to run, and in which setting: `Setting`, `DdpSetting`, or what else has `arrangement` and `shard`."""


@dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= atol + rtol * |expected| + of_largest * (largest |expected| of the tensor)."""

    rtol: float = 0.0
    atol: float = 0.0
    of_largest: float = 0.0


ONE_RANK = Tolerance(rtol=2e-6, atol=2e-7)
"""The same operations, but parameters are stepped joined, and torch's loops round the last elements of a tensor, which
do not fill a vector of the processor, otherwise than the rest."""
FP32 = Tolerance(rtol=1e-5, atol=1e-6)
"""Sums of 12 samples in another order: a few units in the last place (6e-8) of the largest summand, about 1."""


@dataclass(frozen=True)
class LocalShard:
    """A rank's elements of a tensor: a run of the elements of a slab of it, from `first` on."""

    shape: tuple[int, ...]
    slab: tuple[int, int, int]  # a dimension, and the range along it
    first: int
    values: Tensor

    def float(self) -> "LocalShard":
        return replace(self, values=self.values.float())

    def elements(self) -> Tensor:
        """Return the places of the values in the flattened tensor."""
        dim, start, stop = self.slab
        at = torch.arange(math.prod(self.shape)).view(self.shape)
        slab = at.narrow(dim, start, stop - start) if self.shape else at
        return slab.reshape(-1)[self.first : self.first + self.values.numel()]


@dataclass
class Recording:
    """What a script noted, in order. A rank returns a digest of all notes and its local shards; rank 0 the rest."""

    losses: list[float] = field(default_factory=list)
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # tensors, shards, or None
    digest: list[tuple[str, str, bool, int]] = field(default_factory=list)  # True: of a shard


class Run:
    """A script's hands: the model it trains, its data, and a note book."""

    def __init__(self, scenario: Scenario, setting: Any, num_ranks: int | None = None) -> None:
        self.case = scenario.case
        self.num_ranks = num_ranks or dist.get_world_size()
        self.recording = Recording()
        self.arrangement = FLAT if setting is None else setting.arrangement
        self.sharded: MegatronFSDP | None = None  # the wrapped model; None on one process
        self.num_steps = 0
        with fixed_seed(0):
            self.model: nn.Module = scenario.case.build()
        if setting is None:
            self.ranks_here = tuple(range(self.num_ranks))  # the ranks whose samples this process computes
            self.optimizer = scenario.optimizer(self.model)
        else:
            self.ranks_here = (dist.get_rank(),)
            self.arrangement.place(self.model)
            self.sharded, self.optimizer = setting.shard(scenario, self.model)
            self.model = self.sharded

    def whole_batch(self, index: int) -> Batch:
        """Batch `index` of all ranks together."""
        return self.case.make_batch(SAMPLES, torch.Generator().manual_seed(index))

    def batch(self, index: int) -> Batch:
        """What this process computes of batch `index`: everything, or the part of its rank."""
        whole = self.whole_batch(index)
        return self.arrangement.part(whole) if self.sharded is not None else whole

    def loss(self, index: int) -> Tensor:
        """The loss of this process' samples of batch `index`; noted, as the mean over the ranks is compared."""
        loss = self.case.loss(self.model, self.batch(index))
        self.note_loss(loss)
        return loss

    def note_loss(self, loss: Tensor) -> None:
        self.recording.losses.append(loss.item())

    def backward(self, *indices: int) -> None:
        for index in indices:
            self.loss(index).backward()

    def backward_of(self, rank: int, index: int) -> None:
        """Forward and backward of what one of the ranks here has of a batch; its loss is not noted."""
        part = self.whole_batch(index).part(rank, self.num_ranks)
        (self.case.loss(self.model, part) / len(self.ranks_here)).backward()

    @property
    def module(self) -> nn.Module:
        """The user's own model, without the wrapper."""
        return self.sharded.module if self.is_wrapped else self.model  # type: ignore[union-attr]

    @property
    def is_wrapped(self) -> bool:
        """Whether the model has methods for whole tensors: it is sharded, and not in place."""
        return hasattr(self.sharded, "full_gradients")

    @property
    def notes_whole(self) -> bool:
        """Whether only whole tensors can be noted."""
        return not self.is_wrapped or self.arrangement.whole is not FLAT.whole

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext() if self.sharded is None else self.sharded.no_sync()

    def add_optimizer(self, optimizer_fn: OptimizerFn) -> torch.optim.Optimizer:
        optimizer = optimizer_fn(self.model)
        return optimizer if self.sharded is None else fully_shard_optimizer(optimizer)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer sees, by canonical name."""
        return {name.removeprefix("module."): p for name, p in self.model.named_parameters()}

    def note(self, label: str, values: Values) -> None:
        """Note whole tensors, the same on every rank."""
        copies = {name: None if value is None else value.detach().clone() for name, value in values.items()}
        self.recording.notes.append((label, copies))

    def note_gradients(self, label: str = "gradients") -> None:
        """Note every gradient, None included."""
        if self.is_wrapped:
            self.note(label, self.arrangement.whole(self.sharded.full_gradients()))  # type: ignore[union-attr]
        else:
            self.note(label, {name: full_of(p.grad) for name, p in self.model.named_parameters() if p.requires_grad})

    def note_parameters(self, label: str = "parameters") -> None:
        if self.is_wrapped:
            self.note(label, self.arrangement.whole(self.sharded.full_parameters()))  # type: ignore[union-attr]
        else:
            self.note(label, {name: full_of(param) for name, param in self.model.named_parameters()})

    def note_local_shards(self, label: str, tensors_of: Callable[[ParameterGroup], Sequence[Tensor | None]]) -> None:
        """Note local shards, cut as main weights are, without messages: whole tensors take several each."""
        assert self.sharded is not None
        found: dict[str, LocalShard | None] = {}
        for group in self.sharded._engine.groups():
            for index, (name, tensor) in enumerate(zip(group.names, tensors_of(group), strict=True)):
                if label == "parameters" or group.plan.requires_grad:
                    found[name] = None if tensor is None else _local_shard(group, index, local_tensor(tensor))
        self.recording.notes.append((label, found))

    def step(self) -> None:
        """Step, with notes of gradients and parameters; by the public functions in the first step and the second."""
        if self.notes_whole or self.num_steps == 0:
            self.note_gradients()
        else:
            self.note_local_shards("gradients", lambda group: group.grads())
        self.optimizer.step()
        if self.notes_whole or self.num_steps == 1:
            self.note_parameters()
        else:
            self.note_local_shards("parameters", lambda group: group.sharded)
        self.num_steps += 1
        self.optimizer.zero_grad()

    def scale(self, factor: float) -> None:
        """Multiply the gradients that were accumulated; of the sharded model also those that are not shown yet."""
        if self.sharded is not None:
            self.sharded.scale_gradients(factor)
        else:
            torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], factor)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint with torch's functions."""
        save(self.state(), checkpoint_id=folder)

    def load(self, folder: str | Path) -> None:
        state = self.state()
        load(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def train(self, *indices: int) -> None:
        for index in indices:
            self.backward(index)
            self.step()


def full_of(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local_shard(group: ParameterGroup, index: int, local: Tensor) -> LocalShard:
    layout, parts = group.plan.layout, parts_of(group, index)
    shape, slab = layout.shapes[index], (0, 0, layout.shapes[index][0] if layout.shapes[index] else 0)
    if parts is not None:
        assert parts.dim is not None
        rank, lengths = dist.get_rank(parts.group), [each[parts.dim] for each in parts.shapes]
        slab = (parts.dim, sum(lengths[:rank]), sum(lengths[: rank + 1]))
        shape = (*shape[: parts.dim], sum(lengths), *shape[parts.dim + 1 :])
    first, _ = layout.range_in(index, group.plan.main_region)
    return LocalShard(shape, slab, first, local.detach().reshape(-1).clone())


def _joined(shards: Sequence[LocalShard]) -> Tensor:
    """Put a tensor together; elements that no rank holds are NaN, those that several hold have to be the same."""
    whole = torch.full((math.prod(shards[0].shape),), torch.nan, dtype=shards[0].values.dtype)
    for shard in shards:
        whole[shard.elements()] = shard.values
    for rank, shard in enumerate(shards):
        assert torch.equal(whole[shard.elements()], shard.values), f"rank {rank} holds other values than a later one"
    return whole.view(shards[0].shape)


def check_strategies(
    run_ranks: RunRanks, num_ranks: int, scenario: Scenario, settings: Sequence[Any], tolerance: Tolerance = FP32
) -> None:
    """Run a scenario in each setting and assert parity with one process that stands for as many ranks."""
    check_jobs(run_ranks, num_ranks, [(scenario, setting) for setting in settings], tolerance)


def check_jobs(
    run_ranks: RunRanks, num_ranks: int, jobs: Sequence[Job], tolerance: Tolerance | Sequence[Tolerance] = FP32
) -> None:
    """Run each scenario in its setting and assert the same, within one tolerance or one for each."""
    tolerances = [tolerance] * len(jobs) if isinstance(tolerance, Tolerance) else tolerance
    by_rank = run_ranks(num_ranks, run_sharded, list(jobs))
    for (scenario, setting), allowed, *outcomes in zip(jobs, tolerances, *by_rank, strict=True):
        try:
            assert_parity(outcomes, reference(scenario, num_ranks), allowed)
        except AssertionError as error:
            where = f"{num_ranks} ranks, {scenario.script}, {scenario.case.build}, {setting}"
            raise AssertionError(f"{where}: {error}") from None


def run_sharded(jobs: Sequence[Job]) -> list[Recording]:
    outcomes = []
    for scenario, setting in jobs:
        run = Run(scenario, setting)
        try:
            scenario.script(run)
        except Exception as error:
            error.add_note(f"in {scenario.script} with {setting}")
            raise
        outcomes.append(outcome_of(run))
    return outcomes


def outcome_of(run: Run) -> Recording:
    def checksum(value: Tensor | LocalShard | None) -> int:
        value = value.values if isinstance(value, LocalShard) else value
        return -1 if value is None else zlib.crc32(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())

    digest, sent = [], []
    for label, values in run.recording.notes:
        digest += [(label, name, isinstance(value, LocalShard), checksum(value)) for name, value in values.items()]
        kept = {name: value for name, value in values.items() if dist.get_rank() == 0 or isinstance(value, LocalShard)}
        sent.append((label, kept))
    return Recording(run.recording.losses, sent, digest)


@cache
def reference(scenario: Scenario, num_ranks: int = 1) -> Recording:
    """Run a scenario on this process alone, which stands for so many ranks to scripts that ask."""
    with one_thread():
        run = Run(scenario, None, num_ranks)
        scenario.script(run)
    return run.recording


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute as ranks do, on one thread: sums of several round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_parity(outcomes: Sequence[Recording], expected: Recording, tolerance: Tolerance) -> None:
    """Assert that all ranks agree bit for bit, and with the expected recording within the tolerance."""
    losses = [sum(of_ranks) / len(outcomes) for of_ranks in zip(*(o.losses for o in outcomes), strict=True)]
    assert len(losses) == len(expected.losses)
    for position, (got, want) in enumerate(zip(losses, expected.losses, strict=True)):
        allowed = tolerance.atol + (tolerance.rtol + tolerance.of_largest) * abs(want)
        assert math.isclose(got, want, rel_tol=0.0, abs_tol=allowed), f"loss {position}: got {got}, expected {want}"
    assert_notes(outcomes, expected, tolerance)


def assert_bits(outcomes: Sequence[Recording], expected: Recording) -> None:
    """Assert equal bits; what was expected has the losses of the ranks in turn."""
    assert_notes(outcomes, expected, Tolerance())
    for rank, outcome in enumerate(outcomes):
        assert outcome.losses == expected.losses[rank :: len(outcomes)], f"rank {rank}"


def assert_notes(outcomes: Sequence[Recording], expected: Recording, tolerance: Tolerance) -> None:
    """Assert the same of all but the losses."""
    first, *_ = agreed = [[each[:3] if each[2] else each for each in outcome.digest] for outcome in outcomes]
    for rank, digest in enumerate(agreed):
        assert digest == first, f"rank {rank} holds other values than rank 0"
    notes = outcomes[0].notes
    assert [label for label, _ in notes] == [label for label, _ in expected.notes]
    for position, ((label, got_values), (_, want_values)) in enumerate(zip(notes, expected.notes, strict=True)):
        try:
            of_ranks = [outcome.notes[position][1] for outcome in outcomes]
            whole = {
                name: _joined([values[name] for values in of_ranks]) if isinstance(value, LocalShard) else value
                for name, value in got_values.items()
            }
            assert_values(whole, want_values, tolerance)
        except AssertionError as error:
            raise AssertionError(f"note {position} ({label}): {error}") from None


def assert_values(actual: Values, expected: Values, tolerance: Tolerance) -> None:
    """Assert the same names, None for the same names, and equal tensors within the tolerance."""
    assert actual.keys() == expected.keys(), f"names differ: {sorted(actual.keys() ^ expected.keys())}"
    for name, want in expected.items():
        got = actual[name]
        if got is None or want is None:
            assert got is want, f"{name}: only one of {got} and {want} is None"
            continue
        atol = tolerance.atol + (tolerance.of_largest * want.abs().max().item() if tolerance.of_largest else 0.0)
        assert_equal_tensors({name: got}, {name: want}, tolerance.rtol, atol)


STRATEGIES = tuple(Setting(strategy) for strategy in range(4))
MAX_NORM = 0.05
"""A norm that every gradient exceeds."""


def each_half(settings: tuple[Any, ...], *scripts: Callable[[Run], None]) -> Callable[[Test], Test]:
    """Parametrize a test by `script`, where there are some, and by `settings`, the even and the odd ones.

    The short suite runs every script, and every setting, but not each with each.
    """

    def mark(test: Test) -> Test:
        test = pytest.mark.parametrize("settings", [settings[::2], settings[1::2]], ids=["even", "odd"])(test)
        if not scripts:
            return pytest.mark.full(short=["odd"])(test)
        return pytest.mark.full(cover=1)(pytest.mark.parametrize("script", scripts)(test))

    return mark


def adamw_above_noise(model: nn.Module) -> torch.optim.Optimizer:
    """An eps above rounding noise: the exact gradient of the bias of keys is 0."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def decayed_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Of all parameters: decay and momentum show where a gradient is not None."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def two_steps(run: Run) -> None:
    run.train(0, 1)


def three_steps(run: Run) -> None:
    run.train(0, 1, 2)


def train_and_accumulate(run: Run) -> None:
    run.train(0, 1)
    with run.no_sync():
        run.loss(2).backward()
    run.train(3)


def accumulate(run: Run) -> None:
    """A deferred backward and one that is not, two that are not, and one of two forwards; an evaluation in between."""
    with run.no_sync():
        (run.loss(0) / 2).backward()
    (run.loss(1) / 2).backward()
    run.step()
    for index in (2, 3):
        (run.loss(index) / 2).backward()
    run.step()
    with torch.no_grad():
        run.loss(4)
    first, second = run.loss(5), run.loss(6)
    (first + second).backward()
    run.step()
    run.train(7)


def defer_two_of_three(run: Run) -> None:
    """Two steps of three microbatches each, the first two of which are deferred."""
    for step in range(2):
        with run.no_sync():
            (run.loss(3 * step) / 3).backward()
            (run.loss(3 * step + 1) / 3).backward()
        (run.loss(3 * step + 2) / 3).backward()
        run.step()


def mean_over_all_tokens(run: Run) -> None:
    """Each rank divides the sum over its tokens by the number of tokens that all ranks have in all microbatches."""
    for step in range(2):
        count = sum(tokens_in(run.whole_batch(2 * step + microbatch)) for microbatch in range(2))
        for microbatch in range(2):
            loss = run.case.loss(run.model, run.batch(2 * step + microbatch)) / count
            run.note_loss(loss if run.sharded is None else loss * run.num_ranks)
            loss.backward()
        run.step()


def tokens_in(batch: Batch) -> int:
    return int((batch.targets != IGNORED).sum())


def clip_by_model(run: Run) -> None:
    """Three steps with the method; torch's function on one process."""
    clip_by_torch(run, run.sharded)


def clip_by_torch(run: Run, model: MegatronFSDP | None = None) -> None:
    """Three steps with torch's function on both sides, or with a model's method."""
    for step in range(3):
        run.backward(step)
        if model is not None:
            norm = model.clip_grad_norm_(MAX_NORM)
        else:
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), MAX_NORM)
        run.note("norm", {"norm": norm.full_tensor() if isinstance(norm, DTensor) else norm})
        run.step()


@dataclass(frozen=True)
class DdpSetting:
    """How a scenario is wrapped."""

    fields: Named = ()  # of the configuration
    options: Named = ()  # further arguments of the wrapper
    connects: bool = True  # tell the optimizer of the model, else step a plain one
    arrangement: Arrangement = FLAT

    def shard(self, scenario: Scenario, model: nn.Module) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        found = dict(self.arrangement.arguments())
        if "dp_shard_dim" in found:
            found["dp_dim"] = found.pop("dp_shard_dim")  # its name here
        config = DistributedDataParallelConfig(**dict(self.fields))
        if config.use_megatron_fsdp:
            found["fsdp_unit_modules"] = scenario.case.unit_classes
        wrapped = DistributedDataParallel(config, model, **found, **dict(self.options))
        optimizer = scenario.optimizer(wrapped)
        return wrapped, fully_shard_optimizer(optimizer) if self.connects else optimizer


def ddp(
    options: dict[str, Any] | None = None, connects: bool = True, arrangement: Arrangement = FLAT, **fields: Any
) -> DdpSetting:
    """A setting, with fields of the configuration by name."""
    return DdpSetting(tuple(fields.items()), tuple((options or {}).items()), connects, arrangement)


REPLICATED = ddp(overlap_grad_reduce=True, bucket_size=40)
_OVERLAPPED: Any = dict.fromkeys(["use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"], True)
IN_TURN = ddp(**_OVERLAPPED, bucket_size=40)
TOGETHER = ddp(**_OVERLAPPED, align_param_gather=True, bucket_size=90)
EVERY_WAY = (*STRATEGIES, REPLICATED, IN_TURN)
"""Units under each strategy, and buckets of whole and of sharded state."""
