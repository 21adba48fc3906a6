"""Run a fuzz case on one process and on ranks, and compare everything that a user could look at."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.fuzzing.case import SAMPLES, STEPS, Case
from tests.fuzzing.model import VOCABULARY, Net, batch, build

Named = dict[str, Tensor | None]


@dataclass
class Trace:
    """What was seen, in order: (label, values by name)."""

    entries: list[tuple[str, Named]] = field(default_factory=list)  # that
    # how far elements may be off besides, for entries by their position
    rounding: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def note(self, label: str, values: Named) -> None:
        copies = {name: None if value is None else value.detach().clone() for name, value in values.items()}
        self.entries.append((label, copies))


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Matrices with weight decay, the rest without."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    kind = case.optimizer.partition("-")[2]
    # A large eps: noise in gradients that are nearly 0 must not become a step of full size.
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-2, **({kind: True} if kind else {"foreach": False}))


def loss_of(case: Case, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the samples given, over all microbatches of the step; a sum over the whole batch where asked for."""
    logits = model(inputs).double()
    losses = F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1), reduction="none")
    whole_numel = SAMPLES * targets.shape[1]
    if case.options.get("calculate_per_token_loss"):
        return losses.sum() / (whole_numel * case.microbatches)
    return losses.mean() / case.microbatches


class OneProcess:
    """The reference: the parts of all ranks, one after another, on a plain model."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model: nn.Module = build(case)
        main = case.policy.main_params_dtype
        if main is not None:  # the reference has no second copy of the weights: it computes in the wider type
            wide = torch.promote_types(main, case.compute)
            self.model.to(wide)
        self.optimizer = make_optimizer(case, self.model)
        self._all_used = False

    def settle(self) -> None:
        """Ranks that found every parameter used once never ask again, and settle for zeros later on."""
        if self.case.mesh.data_parallel == 1 or self.case.options.get("find_unused_parameters"):
            return
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if self._all_used:
            for param in trainable:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
        self._all_used = all(p.grad is not None for p in trainable)

    def sync(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def parts(self, whole: Tensor) -> Iterator[Tensor]:
        """What is computed here of a batch, one forward and backward each."""
        yield from whole.chunk(self.case.mesh.data_parallel)

    @property
    def share(self) -> float:
        """What the loss of one part counts for."""
        per_token = self.case.options.get("calculate_per_token_loss")
        return 1.0 if per_token else 1.0 / self.case.mesh.data_parallel

    def gradients(self) -> Named:
        return {name: whole(p.grad) for name, p in self.model.named_parameters() if p.requires_grad}

    def parameters(self) -> Named:
        return {name: whole(p) for name, p in self.model.named_parameters()}

    def clip(self, max_norm: float) -> Tensor | None:
        return whole(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def reload(self) -> None:
        """Loading what is there changes nothing."""
        self.model.load_state_dict(self.model.state_dict())

    def follow(self, trace: Trace) -> None:
        """Told of each new entry; nobody leads."""


class Led(OneProcess):
    """The reference where gradients travel in 16 bits: it goes on from what the ranks have in place of its own values.

    So rounding of one step is not in the weights of the next, where nobody could say how far it may grow, and how far a
    gradient may be off follows from the terms that it is the sum of.
    """

    def __init__(self, case: Case, lead: Trace) -> None:
        super().__init__(case)
        self._lead = lead
        self._terms: dict[str, list[Tensor]] = {}
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self._terms[name] = []
                param.register_hook(partial(self._note_term, name))

    def _note_term(self, name: str, grad: Tensor) -> None:
        self._terms[name].append(grad.detach().double().abs())

    def follow(self, trace: Trace) -> None:
        """Take over gradients and weights."""
        position = len(trace.entries) - 1
        label, theirs = self._lead.entries[position]
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                value = theirs.get(name)
                if label == "gradients" and name in theirs:
                    param.grad = None if value is None else value.to(param.dtype, copy=True)
                elif label == "parameters" and value is not None:
                    param.copy_(value)
        if label == "gradients":
            trace.rounding[position] = {name: self._rounding(terms) for name, terms in self._terms.items() if terms}
            for terms in self._terms.values():
                terms.clear()

    def _rounding(self, terms: list[Tensor]) -> Tensor:
        """The most that rounding to 16 bits changes the sum of terms, of all ranks and microbatches of a step.

        A term is rounded when it is copied into its rank's bucket, when each other one of its rank is added to it, when
        each other rank's are, by the factor, when an outer axis takes it over, and at the end: by (1 + u) at most each
        time. The errors of all terms add up (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2).
        """
        dtype = self.case.policy.grad_comm_dtype
        assert dtype is not None
        ranks = self.case.mesh.data_parallel
        roundings = math.ceil(len(terms) / ranks) + (ranks - 1) + 3
        return math.expm1(roundings * math.log1p(torch.finfo(dtype).eps / 2)) * torch.stack(terms).sum(0)


class Ranks(OneProcess):
    """The same on this rank of a sharded model; each door has a class."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = build(case)
        self.mesh = make_mesh(case)
        if case.mesh.tensor:
            parallelize(self.model, self.mesh)
        if case.message_bytes is not None:
            os.environ["MFSDP_MESSAGE_BYTES"] = str(case.message_bytes)
        self.shard()
        self.dims = [name for name in ("outer", "shard") if name in (self.mesh.mesh_dim_names or ())]
        self.position = 0
        for name in self.dims:
            self.position = self.position * self.mesh[name].size() + self.mesh.get_local_rank(name)

    def shard(self) -> None:
        """Shard the model, and make an optimizer of it."""
        raise NotImplementedError

    def settle(self) -> None:
        """The engine does that."""

    def parts(self, whole: Tensor) -> Iterator[Tensor]:
        yield whole.chunk(self.case.mesh.data_parallel)[self.position]

    @property
    def share(self) -> float:
        """The engine scales."""
        return 1.0


def make_mesh(case: Case) -> DeviceMesh:
    sizes = {"outer": case.mesh.outer, "shard": case.mesh.shard, "tensor": case.mesh.tensor}
    names = tuple(name for name, ranks in sizes.items() if ranks)
    return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the blocks over the tensor-parallel ranks."""
    assert isinstance(model, Net)
    for block in model.blocks:
        plan = {"core.up": ColwiseParallel(), "core.down": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)


def play(side: OneProcess) -> Trace:
    case, trace = side.case, Trace()
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for microbatch in range(case.microbatches):
            inputs, targets = batch(case, step, microbatch, SAMPLES)
            with side.sync(microbatch == case.microbatches - 1):
                for x, y in zip(side.parts(inputs), side.parts(targets), strict=True):
                    loss = loss_of(case, side.model, x, y) * side.share
                    loss.backward()
                    total += loss.detach()
        side.settle()
        trace.note("loss", {"": total})
        trace.note("gradients", side.gradients())
        side.follow(trace)
        if case.max_norm is not None:
            trace.note("norm", {"": side.clip(case.max_norm)})
        side.optimizer.step()
        trace.note("parameters", side.parameters())
        side.follow(trace)
        _clear(side)
        if case.evaluate:
            with torch.no_grad():
                trace.note("evaluation", {"": side.model(batch(case, 99, step, 2)[0])})
        if case.reload:
            side.reload()
    return trace


def _clear(side: OneProcess) -> None:
    how = side.case.zero
    if how == "module":
        side.model.zero_grad()
    elif how != "never":
        side.optimizer.zero_grad(set_to_none=how == "none")


def play_sharded(side: Ranks) -> Trace:
    """Play on a rank; losses are those of the whole batch. Ranks agree bit for bit on everything else."""
    trace = play(side)
    for label, values in trace.entries:
        if label == "loss":
            for dim in side.dims:
                dist.all_reduce(values[""], group=side.mesh.get_group(dim))
            if not side.case.options.get("calculate_per_token_loss"):
                values[""] /= side.case.mesh.data_parallel
    return trace


def judge(case: Case, found: Sequence[Trace], slack: float = 1.0) -> list[str]:
    """What differs from one process in the traces of ranks by more than so many tolerances, in words."""
    dtype = case.policy.grad_comm_dtype
    expected = play(Led(case, found[0]) if dtype is not None and dtype.itemsize == 2 else OneProcess(case))
    return [
        f"rank {rank}: {text}"
        for rank, trace in enumerate(found)
        for text in differences(expected, trace, slack * case.tolerance)
    ]


def differences(expected: Trace, found: Trace, tolerance: float) -> list[str]:
    """What differs, in words; empty where nothing does."""
    told: list[str] = []
    for position, ((label, want), (other, got)) in enumerate(zip(expected.entries, found.entries, strict=True)):
        assert label == other
        if want.keys() != got.keys():
            told.append(f"{position} {label}: names differ: {sorted(want.keys() ^ got.keys())}")
            continue
        rounding = expected.rounding.get(position, {})
        told += [
            f"{position} {label} {name}: {text}"
            for name in want
            if (text := _compare(want[name], got[name], tolerance, rounding.get(name)))
        ]
    return told


def whole(value: Tensor | None) -> Tensor | None:
    """The whole of a sharded tensor; collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _largest(value: Tensor | None) -> float:
    return value.abs().max().item() if value is not None and value.numel() else 0.0


def _compare(want: Tensor | None, got: Tensor | None, tolerance: float, rounding: Tensor | None) -> str:
    """What differs, measured by the largest value of the tensor, but at least by 1e-3, and besides by `rounding`."""
    if want is None or got is None:
        return "" if want is got else f"expected {want}, got {got}"
    if want.shape != got.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    error = (want.double() - got.double()).abs()
    excess = error if rounding is None else error - rounding
    largest = max(_largest(want), 1e-3)
    if _largest(excess.clamp(min=0)) <= tolerance * largest:
        return ""
    told = "" if rounding is None else f", of which rounding explains all but {_largest(excess.clamp(min=0)):.3g}"
    return f"differs by {_largest(error):.3g}, largest value {largest:.3g}{told}"
