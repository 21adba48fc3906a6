"""The checked task: building, feeding and training the user's model, sharded or not, and the record of a run."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from megatron_fsdp.config.import_path import import_by_path
from megatron_fsdp.doctor.report import COUNTER, GRADIENT, LOSS, NORM, STATE, WEIGHT
from megatron_fsdp.errors import ConfigurationError

ModelFn = Callable[[], nn.Module]
LossFn = Callable[[nn.Module, Any], Tensor]
OptimizerFn = Callable[[nn.Module], torch.optim.Optimizer]
Pair = tuple[nn.Module, torch.optim.Optimizer]
ShardFn = Callable[[nn.Module, torch.optim.Optimizer], Pair]

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Task:
    """The arguments of `check_parity`; a callable may be given by its import path, "package.module:name"."""

    model_fn: ModelFn | str
    batch: Any
    loss_fn: LossFn | str | None = None
    optimizer_fn: OptimizerFn | str = "adamw"
    shard_fn: ShardFn | str | None = None
    strategies: tuple[int | str, ...] = (0, 1, 2, 3)
    steps: int = 3
    microbatches: int = 1
    max_norm: float | None = 1.0
    reduction: Literal["mean", "sum"] = "mean"
    seed: int = 0
    tolerance: float | None = None
    checkpoint: bool = True
    checkpoint_dir: str | None = None
    made: tuple[Any, ...] = ()  # the batch of each step, so that every run gets the same one

    def build(self, device: torch.device, seed: int | None = None) -> Pair:
        """Build the model on a device and its optimizer, from a known random state."""
        torch.manual_seed(self.seed if seed is None else seed)
        model = _resolve(self.model_fn, "model_fn")()
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"model_fn gave {type(model).__name__}; it has to give a torch.nn.Module")
        model = model.to(device)
        optimizer = self._optimizer_of(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"optimizer_fn gave {type(optimizer).__name__}; it has to give an optimizer")
        return model, optimizer

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [param for param in model.parameters() if param.requires_grad]
        if self.optimizer_fn == "adamw":
            return torch.optim.AdamW(trained, lr=LEARNING_RATE)
        if self.optimizer_fn == "sgd":
            return torch.optim.SGD(trained, lr=LEARNING_RATE)
        return cast(torch.optim.Optimizer, _resolve(self.optimizer_fn, "optimizer_fn")(model))

    def sharding(self) -> ShardFn | None:
        """Return the user's own sharding function, if there is one."""
        return None if self.shard_fn is None else cast(ShardFn, _resolve(self.shard_fn, "shard_fn"))

    def with_batches(self) -> Task:
        """Draw the batch of every step, and of one more for a checkpoint."""
        batch: Any = import_by_path(self.batch, "batch") if isinstance(self.batch, str) else self.batch
        takes_seed = callable(batch) and bool(inspect.signature(batch).parameters)

        def make(step: int) -> Any:
            torch.manual_seed(self.seed + step)
            return batch(self.seed + step) if takes_seed else batch() if callable(batch) else batch

        made = tuple(make(step) for step in range(1, self.steps + 1 + self.checkpoint))
        if takes_seed and digest_of_batch(made[0]) != digest_of_batch(make(1)):
            raise ConfigurationError(
                f"batch({self.seed + 1}) gives other samples each time, though torch.manual_seed is called before; "
                "draw them from a generator with the seed it is given"
            )
        return replace(self, made=made)

    def microbatches_of(self, step: int, num_ranks: int, device: torch.device) -> list[Any]:
        """Return the microbatches of a step (counted from 1), each for all ranks together."""
        batch = self.made[step - 1]
        samples, parts = count_samples(batch), num_ranks * self.microbatches
        if samples == 0 or samples % parts:
            raise ConfigurationError(
                f"a batch of {samples} samples does not divide into {self.microbatches} microbatch(es) of {num_ranks} "
                f"equal slices; give a multiple of {parts} samples, or another number of ranks or microbatches"
            )
        # A copy: a model may write to its inputs.
        batch = tree_map(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, batch)
        return parts_of(batch, self.microbatches)

    def share_of_rank(self, num_ranks: int) -> float:
        """Return the weight of one rank's loss in the loss of all ranks."""
        return 1 / num_ranks if self.reduction == "mean" else 1.0

    def loss_of(self, model: nn.Module, samples: Any) -> Tensor:
        """Compute the loss: `loss_fn`, or `.loss` of `model(**samples)`, `model(*samples)` or `model(samples)`."""
        if self.loss_fn is not None:
            loss = _resolve(self.loss_fn, "loss_fn")(model, samples)
            return _checked(loss, "loss_fn gave", "it has to give a scalar tensor")
        if isinstance(samples, dict):
            out = model(**samples)
        else:
            out = model(*samples) if isinstance(samples, tuple | list) else model(samples)
        loss = getattr(out, "loss", None)
        if loss is None:
            loss = out["loss"] if isinstance(out, dict) and "loss" in out else out
        return _checked(loss, "the model gave", "give loss_fn=(model, samples) -> scalar loss")


def _resolve(given: Any, argument: str) -> Callable[..., Any]:
    found = import_by_path(given, argument) if isinstance(given, str) else given
    if not callable(found):
        raise ConfigurationError(f"{argument} is {found!r}; give a function, or the import path of one")
    return cast(Callable[..., Any], found)


def _checked(loss: Any, gave: str, hint: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigurationError(f"{gave} {what} where the loss is wanted; {hint}")
    return loss.squeeze()


def require_count(argument: str, value: Any) -> None:
    """Reject a value that is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{argument} is {value!r}; give a whole number from 1")


# ---- batches ---------------------------------------------------------------------------------------------------------


def count_samples(batch: Any) -> int:
    """Count the samples of a batch: the common first dimension of its tensors.

    Numbers and other values belong to every part.
    """
    leaves = tree_flatten_with_path(batch)[0]
    lengths = {
        "".join(map(str, path)) or "batch": len(leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    }
    if not lengths:
        raise ConfigurationError("the batch holds no tensor with a dimension; the first dimension of each is samples")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigurationError(
            f"the first dimension of every tensor of the batch is samples, and these differ: {shown}; expand what all "
            "samples share, or close over it in loss_fn"
        )
    return next(iter(lengths.values()))


def parts_of(batch: Any, count: int) -> list[Any]:
    """Split a batch into equal parts, in the order of the samples."""
    length = count_samples(batch) // count

    def cut(leaf: Any, part: int) -> Any:
        has_samples = isinstance(leaf, Tensor) and leaf.dim() > 0
        return leaf[part * length : (part + 1) * length] if has_samples else leaf

    return [tree_map(partial(cut, part=part), batch) for part in range(count)]


def slices_of_ranks(microbatches: Sequence[Any], num_ranks: int) -> list[list[Any]]:
    """Return the samples of each rank: its slice of every microbatch."""
    slices = [parts_of(each, num_ranks) for each in microbatches]
    return [list(of_rank) for of_rank in zip(*slices, strict=True)]


def digest_of(value: Tensor) -> bytes:
    """Hash the bits and the shape of a CPU tensor."""
    data = value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data + repr(value.shape).encode(), digest_size=16).digest()


def digest_of_batch(batch: Any) -> bytes:
    """Hash the tensors, numbers and strings in dicts, tuples and lists; ignore other values."""
    leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor | str | int | float))
    each = (digest_of(leaf.cpu()) if isinstance(leaf, Tensor) else repr(leaf).encode() for leaf in leaves)
    return hashlib.blake2b(b"".join(each), digest_size=16).digest()


# ---- training -------------------------------------------------------------------------------------------------------

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

Values = Mapping[str, Tensor]
"""Whole tensors on the CPU by the names of the user's model; the loss and the norm by ""."""
Place = tuple[str, int]
"""The kind of value, and its step (from 1; 0: before the first)."""
AddUp = Callable[[float], float]
"""Sums this process's loss over all ranks."""


@dataclass(frozen=True)
class Observation:
    """The values of one run."""

    values: Mapping[Place, Values]  # all that is compared, in the order of causes
    # the saved and the loaded values, and the step after it with and without loading
    round_trip: Mapping[Place, tuple[Values, Values]] = field(default_factory=dict)
    # where ranks hold different values that should be the same: those of each rank, by name
    disagreements: Mapping[Place, Mapping[str, tuple[Tensor | None, ...]]] = field(default_factory=dict)


class Trainee:
    """A model and its optimizer; methods that read tensors are collective if they are sharded.

    `known` has the names of parameters and buffers in the user's model; empty: this is that model.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, known: Iterable[str] = ()
    ) -> None:
        self.model, self.optimizer, self._task = model, optimizer, task
        self._known = frozenset(known)

    # ---- reading ------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters by the names of the user's model; tied ones once."""
        return ((self._own_name(name), param) for name, param in self.model.named_parameters())

    def parameters(self) -> Values:
        """Return the whole weights."""
        return {name: whole(param) for name, param in self.named_parameters()}

    def gradients(self) -> Values:
        """Return the whole gradients, of parameters that have one."""
        found: dict[str, Tensor] = {}
        for name, param in self.named_parameters():
            grad = param.grad if param.grad is not None else getattr(param, "decoupled_grad", None)
            if grad is not None:
                found[name] = whole(grad)
        return found

    def buffers(self) -> Values:
        """Return the whole buffers."""
        return {self._own_name(name): whole(buffer) for name, buffer in self.model.named_buffers()}

    def put_back(self, values: Values) -> None:
        """Restore the named parameters and buffers of an unsharded model."""
        with torch.no_grad():
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                if name in values:
                    tensor.copy_(values[name])

    def optimizer_state(self) -> tuple[Values, Values]:
        """Return the step counter of each parameter, and the other tensors as `<parameter>: <slot>`."""
        counters, tensors = dict[str, Tensor](), dict[str, Tensor]()
        for name, param in self.named_parameters():
            for slot, value in self.optimizer.state.get(param, {}).items():
                if slot == "step":
                    counters[name] = number(float(value))
                elif isinstance(value, Tensor) and (isinstance(value, DTensor) or value.shape == param.shape):
                    tensors[f"{name}: {slot}"] = whole(value)
        return counters, tensors

    def _own_name(self, name: str) -> str:
        """Return the name in the user's model, without wrapper prefixes."""
        if not self._known or name in self._known:
            return name
        short = name
        while short.startswith("module."):
            short = short.removeprefix("module.")
            if short in self._known:
                return short
        # Also of a buffer that was registered later.
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

    # ---- training -----------------------------------------------------------------------------------------------

    def backward(self, ranks: Sequence[Sequence[Any]], share: float = 1.0) -> float:
        """Run forward and backward on the samples of several ranks, by microbatch; return the sum of losses.

        Each rank begins with equal buffers, those of the first are kept, and gradients add up. The mean over its
        microbatches is weighted by `share`.
        """
        weight, total = share / self._task.microbatches, 0.0
        before: Values = self.buffers() if len(ranks) > 1 else {}
        kept: Values = {}
        for microbatches in ranks:
            self.put_back(before)
            for samples in microbatches:
                loss = self._task.loss_of(self.model, samples)
                (loss * weight).backward()
                total += float(loss.detach()) * weight
            kept = kept or (self.buffers() if before else {})
        self.put_back(kept)
        return total

    def step(
        self, number_of_step: int, ranks: Sequence[Sequence[Any]], share: float = 1.0, add_up: AddUp = float
    ) -> dict[Place, Values]:
        """Run one optimizer step on the samples of the given ranks, and record everything."""
        self.optimizer.zero_grad()
        loss = add_up(self.backward(ranks, share))
        gradients = self.gradients()
        norm = self._clip()
        self.optimizer.step()
        counters, state = self.optimizer_state()
        found: dict[str, Values] = {
            LOSS: {"": number(loss)},
            GRADIENT: gradients,
            NORM: {} if norm is None else {"": number(norm)},
            COUNTER: counters,
            WEIGHT: self.parameters(),
            STATE: state,
        }
        self.optimizer.zero_grad()
        return {(where, number_of_step): values for where, values in found.items()}

    def _clip(self) -> float | None:
        """Clip by the model's own method or torch's, and return the norm before clipping."""
        if self._task.max_norm is None:
            return None
        torchs_own = partial(nn.utils.clip_grad_norm_, self.model.parameters())
        norm = getattr(self.model, "clip_grad_norm_", torchs_own)(self._task.max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def whole(tensor: Tensor) -> Tensor:
    """Copy a whole tensor to the CPU; collective if it is sharded."""
    with torch.no_grad():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().to("cpu", copy=True)


def number(value: float) -> Tensor:
    """Return a number as a float64 tensor."""
    return torch.tensor(value, dtype=torch.float64)
