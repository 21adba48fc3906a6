"""The list of decoder layers of a stage, which stands in for the whole list while the model's own forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class StandIn(Tensor):
    """Hidden states that nobody will read. Its first element is itself: some models take what layers give as tuples."""

    def __getitem__(self, index: Any) -> Tensor:
        return self if isinstance(index, int) else super().__getitem__(index)


class AbsentLayer:
    """A layer of another stage: it has the plain attributes that a model's forward may read, and computes nothing.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float | None)}
        vars(self).update({name: value for name, value in plain.items() if not name.startswith("_")})

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Something of the shape of the hidden states, without memory of its own."""
        zero = torch.zeros((), dtype=hidden_states.dtype, device=hidden_states.device)
        return zero.expand(hidden_states.shape).as_subclass(StandIn)


@dataclass
class StageRun:
    """One forward of a stage.

    Attributes:
        received: What the stage before has sent, (microbatch, sequence, hidden); None in the first stage.
        result: What the last layer of this stage gave.
    """

    received: Tensor | None
    result: Tensor | None = None


class StageLayers(nn.ModuleDict):
    """The layers of one stage under their indices in the whole model: a ModuleDict.

    In `standing_in`, and only there, it iterates as the whole list does: forwards of transformers count layers and look
    up their kinds (full or sliding attention) by the index. The first layer here is then given what the stage before
    has sent, whatever the model has made of its inputs until then (scaled embeddings, dropout), and what the last one
    gives is kept.

    Args:
        layers: Of the whole model.
        start: First layer of the stage.
        stop: One past the last.
    """

    def __init__(self, layers: Sequence[nn.Module], start: int, stop: int) -> None:
        super().__init__({str(index): layers[index] for index in range(start, stop)})
        self._start, self._stop = start, stop
        self._absent = {index: AbsentLayer(layer) for index, layer in enumerate(layers) if not start <= index < stop}
        self._run: StageRun | None = None

    @contextmanager
    def standing_in(self, received: Tensor | None) -> Iterator[StageRun]:
        """Stand in for the whole list in the block.

        Args:
            received: What the stage before has sent; None in the first stage.
        """
        self._run = StageRun(received)
        try:
            yield self._run
        finally:
            self._run = None

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._run is None else iter(self._whole(self._run))

    def __len__(self) -> int:
        return super().__len__() if self._run is None else super().__len__() + len(self._absent)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) or self._run is None:
            return super().__getitem__(key)
        return self._whole(self._run)[key]

    def _whole(self, run: StageRun) -> list[Any]:
        slots: dict[int, Any] = {**self._absent}
        for index in range(self._start, self._stop):
            layer = super().__getitem__(str(index))
            at_end = index == self._start or index == self._stop - 1
            slots[index] = _EndLayer(layer, run, index == self._start, index == self._stop - 1) if at_end else layer
        return [slots[index] for index in sorted(slots)]


class _EndLayer:
    """The first or last layer of a stage, called as the layer itself."""

    def __init__(self, layer: Callable[..., Any], run: StageRun, is_first: bool, is_last: bool) -> None:
        self._layer, self._run, self._is_first, self._is_last = layer, run, is_first, is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_first and self._run.received is not None:
            hidden_states = self._run.received
        output = self._layer(hidden_states, *args, **kwargs)
        if self._is_last:
            self._run.result = output[0] if isinstance(output, tuple) else output
        return output
