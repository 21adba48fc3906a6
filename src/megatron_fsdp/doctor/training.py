"""Trains a model, sharded or not, and records what it does; the same code runs in both settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.doctor.report import COUNTER, GRADIENT, LOSS, NORM, STATE, WEIGHT
from megatron_fsdp.doctor.task import Part, Task

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

Values = Mapping[str, Tensor | None]
"""Whole tensors on the CPU by the names of the user's model; the loss and the norm by an empty name."""
Place = tuple[str, int]
"""The kind of value, and its step (from 1; 0: before the first)."""
AddUp = Callable[[float], float]
"""Sums this process's loss over all ranks."""


@dataclass(frozen=True)
class Observation:
    """The values that one run gave."""

    values: Mapping[Place, Values]  # all that is compared, in the order of causes
    # what was saved and what was loaded, and the step after it with and without loading
    round_trip: Mapping[Place, tuple[Values, Values]] = field(default_factory=dict)
    # where ranks hold different values that should be the same: those of each rank, by name
    disagreements: Mapping[Place, Mapping[str, tuple[Tensor | None, ...]]] = field(default_factory=dict)


class Trainee:
    """A model and its optimizer; methods that read tensors are collective where they are sharded.

    `known` are the names of parameters and buffers in the user's own model; empty: this is that model.
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
        """Return the whole gradients; None where there is none."""
        found: dict[str, Tensor | None] = {}
        for name, param in self.named_parameters():
            grad = param.grad if param.grad is not None else getattr(param, "decoupled_grad", None)
            found[name] = None if grad is None else whole(grad)
        return found

    def buffers(self) -> Values:
        """Return the whole buffers."""
        return {self._own_name(name): whole(buffer) for name, buffer in self.model.named_buffers()}

    def put_back(self, buffers: Values) -> None:
        """Set the buffers of an unsharded model to earlier values."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                value = buffers.get(name)
                if value is not None:
                    buffer.copy_(value)

    def optimizer_state(self) -> tuple[Values, Values]:
        """Return the step counter of each parameter, and the other tensors as `<parameter>: <slot>`."""
        counters, tensors = dict[str, Tensor | None](), dict[str, Tensor | None]()
        for name, param in self.named_parameters():
            for slot, value in self.optimizer.state.get(param, {}).items():
                if slot == "step":
                    counters[name] = number(float(value))
                elif isinstance(value, Tensor) and (isinstance(value, DTensor) or value.shape == param.shape):
                    tensors[f"{name}: {slot}"] = whole(value)
        return counters, tensors

    def _own_name(self, name: str) -> str:
        """Return the name in the user's model, without the prefixes of wrappers."""
        if not self._known or name in self._known:
            return name
        short = name
        while short.startswith("module."):
            short = short.removeprefix("module.")
            if short in self._known:
                return short
        bare = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        return bare if bare in self._known else name

    # ---- training -----------------------------------------------------------------------------------------------

    def backward(self, ranks: Sequence[Sequence[Part]]) -> float:
        """Run forward and backward of the parts of several ranks; return the weighted sum of the losses.

        Each rank begins with the same buffers, those of the first are kept, and gradients add up.
        """
        before, kept, total = None, None, 0.0
        for place, parts in enumerate(ranks):
            if len(ranks) > 1:
                before = self.buffers() if before is None else before
                self.put_back(before)
            for weight, samples in parts:
                loss = self._task.loss_of(self.model, samples)
                (loss * weight).backward()
                total += float(loss.detach()) * weight
            if place == 0 and len(ranks) > 1:
                kept = self.buffers()
        if kept is not None:
            self.put_back(kept)
        return total

    def step(self, number_of_step: int, ranks: Sequence[Sequence[Part]], add_up: AddUp = float) -> dict[Place, Values]:
        """Make one optimizer step with the parts of the given ranks, and record everything."""
        self.optimizer.zero_grad()
        loss = add_up(self.backward(ranks))
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
        """Clip by the model's own method, else by torch's, and return the norm before clipping."""
        if self._task.max_norm is None:
            return None
        clip: Any = getattr(self.model, "clip_grad_norm_", None)
        if clip is not None:
            norm = clip(self._task.max_norm)
        else:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._task.max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def whole(tensor: Tensor) -> Tensor:
    """Copy a whole tensor to the CPU; collective where it is sharded."""
    with torch.no_grad():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().to("cpu", copy=True)


def number(value: float) -> Tensor:
    """Return a number as a float64 tensor."""
    return torch.tensor(value, dtype=torch.float64)
