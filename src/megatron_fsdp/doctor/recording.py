"""Training a model, sharded or not, and noting what it does; the same lines run in both settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.doctor.observation import StepRecord, Values
from megatron_fsdp.doctor.task import Part, Task

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

AddUp = Callable[[float], tuple[float, tuple[float, ...]]]
"""From the loss of this process to that of all, and those of the ranks."""


class Trainee:
    """A model and its optimizer under observation; methods that read tensors are collective where they are sharded.

    Attributes:
        model: What is called.
        optimizer: What is stepped.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, known: Iterable[str] = ()
    ) -> None:
        """Observe.

        Args:
            model: Sharded or not.
            optimizer: Of its parameters.
            task: How to train it.
            known: Names of parameters and buffers in the user's own model; empty: this is that model.
        """
        self.model, self.optimizer, self._task = model, optimizer, task
        self._known = frozenset(known)

    # ---- reading ------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the names of the user's model; tied ones once."""
        return ((self._own_name(name), param) for name, param in self.model.named_parameters())

    def parameters(self) -> Values:
        """Weights, whole."""
        return {name: whole(param) for name, param in self.named_parameters()}

    def owners(self) -> Mapping[str, Tensor]:
        """Which rank holds each element of the parameters that are cut into shards; flat, int16."""
        found = {}
        for name, param in self.named_parameters():
            if isinstance(param, DTensor) and any(placement.is_shard() for placement in param.placements):
                with torch.no_grad():
                    own = torch.zeros_like(param, dtype=torch.float32)
                    own.to_local().fill_(dist.get_rank())  # type: ignore[attr-defined]  # a DTensor as its pattern
                    found[name] = whole(own).flatten().to(torch.int16)
        return found

    def gradients(self) -> Values:
        """Gradients, whole; None where there is none."""
        found: dict[str, Tensor | None] = {}
        for name, param in self.named_parameters():
            grad = param.grad if param.grad is not None else getattr(param, "decoupled_grad", None)
            found[name] = None if grad is None else whole(grad)
        return found

    def buffers(self) -> Values:
        """Buffers, whole."""
        return {self._own_name(name): whole(buffer) for name, buffer in self.model.named_buffers()}

    def put_back(self, buffers: Values) -> None:
        """Set buffers to what they were; of a model that is not sharded."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                value = buffers.get(name)
                if value is not None:
                    buffer.copy_(value)

    def optimizer_state(self) -> tuple[dict[str, float], dict[str, Tensor | None]]:
        """The step counter of each parameter, and the other tensors as `<parameter>: <slot>`."""
        counters, tensors = dict[str, float](), dict[str, Tensor | None]()
        for name, param in self.named_parameters():
            for slot, value in self.optimizer.state.get(param, {}).items():
                if slot == "step":
                    counters[name] = float(value)
                elif isinstance(value, Tensor) and (isinstance(value, DTensor) or value.shape == param.shape):
                    tensors[f"{name}: {slot}"] = whole(value)
        return counters, tensors

    def _own_name(self, name: str) -> str:
        """The name in the user's model, without what wrappers put into it."""
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

    def backward(self, parts: Sequence[Part]) -> float:
        """Forward and backward of some parts; gradients add up.

        Returns:
            The weighed sum of their losses.
        """
        total = 0.0
        for weight, samples in parts:
            loss = self._task.loss_of(self.model, samples)
            (loss * weight).backward()
            total += float(loss.detach()) * weight
        return total

    def backward_of_ranks(self, ranks: Sequence[Sequence[Part]]) -> float:
        """The same for the parts of several ranks, each of which begins with the same buffers; keeps the first's."""
        before = self.buffers()
        total = self.backward(ranks[0])
        kept = self.buffers()
        for parts in ranks[1:]:
            self.put_back(before)
            total += self.backward(parts)
        self.put_back(kept)
        return total

    def step(self, ranks: Sequence[Sequence[Part]], add_up: AddUp) -> StepRecord:
        """One optimizer step of the parts of several ranks that this process stands for; sharded, of its own."""
        self.optimizer.zero_grad()
        loss, of_ranks = add_up(self.backward(ranks[0]) if len(ranks) == 1 else self.backward_of_ranks(ranks))
        gradients = self.gradients()
        norm = self._clip()
        self.optimizer.step()
        counters, state = self.optimizer_state()
        record = StepRecord(loss, of_ranks, gradients, norm, counters, self.parameters(), state)
        self.optimizer.zero_grad()
        return record

    def _clip(self) -> float | None:
        """Clip as the model does it itself, else as torch does; the norm of before."""
        if self._task.max_norm is None:
            return None
        clip: Any = getattr(self.model, "clip_grad_norm_", None)
        if clip is not None:
            norm = clip(self._task.max_norm)
        else:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._task.max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def whole(tensor: Tensor) -> Tensor:
    """A copy of a whole tensor in this process' memory; collective where it is sharded."""
    with torch.no_grad():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return full.detach().to("cpu", copy=True)
