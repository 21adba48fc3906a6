"""`check_invariance`: does a model give a microbatch the same bits wherever it is computed, as deterministic runs need?

One logical microbatch is computed in several ways: again, after another microbatch, with weights at other addresses,
and in other processes, each time with torch's generators seeded alike before it, as runs seed them by step and
microbatch. Not with other numbers of threads: torch's own matrix products and sums differ then, on the CPU. Where the
loss, a gradient or the output of a module differs, every operator that was called, forward and backward, is compared in
turn: the first one that gives other bits is what is not invariant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from megatron_fsdp.comm.agreement import gather_objects, together
from megatron_fsdp.comm.fingerprint import fingerprint
from megatron_fsdp.doctor.local_ranks import run_on_ranks
from megatron_fsdp.doctor.training import LossFn, ModelFn, Task, parts_of
from megatron_fsdp.errors import ConfigurationError

_OUTPUT, _GRADIENT = "the output", "a gradient"
_SHIFT_BYTES = 16  # what tensors of a gathered buffer are aligned to; torch aligns its own to 64


@dataclass(frozen=True)
class Variance:
    """The first thing that a microbatch gives other bits."""

    way: str  # how it was computed
    module: str  # the innermost one that was running, by its name; empty: the model itself, or outside of it
    operator: str  # of torch, such as "aten.index_add"; "the output": of the module, made outside of torch's operators
    backward: bool  # whether it ran in backward
    is_random: bool = False  # whether the operator draws random numbers

    def told(self) -> str:
        """Say it in a sentence."""
        where = f"module `{self.module}`" if self.module else "the model, in no module of its own,"
        hint = ", which draws random numbers that the seed of the microbatch does not decide"
        return (
            f"{self.way}, {self.operator} of {where} has other bits in {'backward' if self.backward else 'forward'}"
            f"{hint if self.is_random else ''}"
        )


@dataclass(frozen=True)
class _Event:
    """What an operator or a module gave, where it ran, and the numbers that an operator was called with."""

    module: str
    operator: str
    backward: bool
    is_random: bool
    numbers: tuple[object, ...]
    bits: tuple[int, ...]


def check_invariance(
    model_fn: ModelFn | str,
    batch: Any,
    *,
    loss_fn: LossFn | str | None = None,
    ranks: int = 2,
    microbatches: int = 1,
    seed: int = 0,
    device: str | None = None,
    timeout_s: float = 600.0,
) -> tuple[Variance, ...]:
    """Compute the first logical microbatch in several ways, and compare the bits; arguments as of `check_parity`.

    Where torch.distributed is initialised, every rank calls this.

    Returns:
        The first difference of each way that has one; empty where the model is invariant.

    Raises:
        ConfigurationError: There are fewer than two microbatches, or an argument cannot be honoured.
        RankError: A rank failed, or took too long.
    """
    task = Task(model_fn, batch, loss_fn, steps=1, microbatches=microbatches, seed=seed, checkpoint=False)
    found: tuple[Variance, ...] = run_on_ranks(_check, task, ranks, device, timeout_s)
    return found


def _check(task: Task, device: torch.device) -> tuple[Variance, ...]:
    """Compare the ways on the existing ranks; collective, the same on all."""
    microbatches = _microbatches(task.with_batches(), device)
    first, own = together("computing a microbatch", lambda: _compare_ways(task, device, microbatches))
    everyone = gather_objects((first, own))
    found = [different for _, own in everyone for different in own]
    found += [
        _difference(f"computed on rank {rank} in place of rank 0", everyone[0][0], other)
        for rank, (other, _) in enumerate(everyone)
    ]
    of_way: dict[str, Variance] = {}
    for different in found:
        if different is not None:
            of_way.setdefault(different.way, different)
    return tuple(of_way.values())


def _compare_ways(
    task: Task, device: torch.device, microbatches: Sequence[Any]
) -> tuple[list[_Event], list[Variance | None]]:
    """Compute a microbatch in the ways of one process; return the first pass, and how each other one differs."""
    first = _pass(task, device, microbatches[:1])
    ways = {
        "computed again": _pass(task, device, microbatches[:1]),
        "computed after another microbatch": _pass(task, device, microbatches[::-1]),
        "computed with weights at other addresses": _pass(task, device, microbatches[:1], moves=True),
    }
    return first, [_difference(way, first, found) for way, found in ways.items()]


def _microbatches(task: Task, device: torch.device) -> list[Any]:
    """Return the first two logical microbatches."""
    ranks = dist.get_world_size()
    found = [part for each in task.microbatches_of(1, ranks, device) for part in parts_of(each, ranks)]
    if len(found) < 2:
        raise ConfigurationError("invariance is looked for over two microbatches or more; give microbatches or ranks")
    return found[:2]


def _pass(task: Task, device: torch.device, microbatches: Sequence[Any], *, moves: bool = False) -> list[_Event]:
    """Run forward and backward of microbatches with a fresh model, each with the same seed; record the last one.

    At its end stand the bits of the loss and of each gradient.
    """
    model, _ = task.build(device)
    if moves:
        for param in model.parameters():
            param.data = _moved(param.data)
    for samples in microbatches:
        model.zero_grad()
        torch.manual_seed(task.seed)
        with _Recorder(model) as recorder:
            loss = task.loss_of(model, samples)
            loss.backward()
    result = tuple(_bits(each) for each in (loss, *(param.grad for param in model.parameters())) if each is not None)
    return [*recorder.events, _Event("", _GRADIENT, backward=True, is_random=False, numbers=(), bits=result)]


def _difference(way: str, first: Sequence[_Event], other: Sequence[_Event]) -> Variance | None:
    """Return the first event that differs, where the result of a pass or the output of a module does."""
    left, right = ([event for event in each if event.operator in (_OUTPUT, _GRADIENT)] for each in (first, other))
    if left == right:
        return None
    one, two = next((one, two) for one, two in zip(first, other, strict=False) if one != two)
    event = one if two.operator == _GRADIENT else two
    return Variance(way, event.module, event.operator, event.backward, event.is_random)


def _moved(tensor: Tensor) -> Tensor:
    """Return a copy that lies as in a gathered buffer, less aligned than torch's own memory."""
    start = max(1, _SHIFT_BYTES // tensor.itemsize)
    return tensor.new_empty(tensor.numel() + start)[start:].copy_(tensor.flatten()).view(tensor.shape)


def _bits(tensor: Tensor) -> int:
    return int(fingerprint(tensor))


class _Recorder(TorchDispatchMode):
    """Records what every operator gives, and every module that is called.

    Not what is memory without values yet, nor what is written to buffers: where it matters it is read again.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives no hints
        self.events: list[_Event] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._root = type(model).__name__
        self._buffers = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
        self._tracker = ModuleTracker()
        self._is_on = True

    def __enter__(self) -> Self:
        self._hook = register_module_forward_hook(self._on_output)
        self._tracker.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._tracker.__exit__(*raised)
        self._hook.remove()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_on and "empty" not in func.__name__:
            numbers = tuple(each for each in tree_leaves((args, kwargs)) if isinstance(each, int | float | str))
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            self._record(self._module(), str(func.overloadpacket), result, is_random, numbers)
        return result

    def _on_output(self, module: nn.Module, _args: Any, output: Any) -> None:
        if id(module) in self._names:
            self._is_on = False  # its bits are read with operators, too
            self._record(self._names[id(module)], _OUTPUT, output)
            self._is_on = True

    def _record(
        self, module: str, operator: str, result: Any, is_random: bool = False, numbers: tuple[object, ...] = ()
    ) -> None:
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        bits = tuple(_bits(each) for each in tensors if each.untyped_storage().data_ptr() not in self._buffers)
        self.events.append(_Event(module, operator, self._tracker.is_bw, is_random, numbers, bits))

    def _module(self) -> str:
        """Return the name of the innermost module that runs."""
        running = max(self._tracker.parents - {"Global"}, key=len, default=self._root)
        return running.removeprefix(self._root).removeprefix(".")
