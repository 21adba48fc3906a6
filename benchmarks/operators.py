"""Exact counts of one step's operators: bytes sent and elements copied."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = frozenset({"copy_", "_to_copy", "clone", "cat", "_foreach_copy_", "contiguous", "copy", "chunk_cat"})
_ONCE = frozenset({"_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"})
_TO_ALL = frozenset({"_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"})
_EXCHANGED = frozenset({"alltoall_base_", "alltoall_"})
_REDUCED = frozenset({"allreduce_", "allreduce_coalesced_"})
_SENT = frozenset({"send", "broadcast_"})

_TORCH = "torch"
ENGINE = "megatron_fsdp."
"""Prefix of the names of this engine's modules."""


@dataclass(frozen=True)
class Moved:
    """The counts of one step on one rank."""

    # by algorithms that reach the minimum (ring or pairwise); broadcasts are shared out evenly, since their senders
    # take turns
    sent_bytes: int
    gloo_bytes: int  # the same where a reduce-scatter moves what an all-reduce does, as gloo's
    copied_numel: int  # elements of the results of copies, casts and multiplications into other memory
    reduced_bytes: int = 0  # of `sent_bytes` those of reductions
    # of `copied_numel` those by the module that asked for them, torch's own passed over
    copied_by: Mapping[str, int] = field(default_factory=dict)


def ring_bytes(name: str, inputs_bytes: int, outputs_bytes: int, num_ranks: int) -> int | None:
    """Count the bytes that one rank sends in a c10d collective; None for collectives without the model's tensors.

    In-place collectives give what they take.
    """
    if name in _TO_ALL:
        return outputs_bytes - outputs_bytes // num_ranks
    if name in _ONCE or name in _EXCHANGED:
        return inputs_bytes - inputs_bytes // num_ranks
    if name in _REDUCED:
        return 2 * (outputs_bytes - outputs_bytes // num_ranks)
    if name in _SENT:
        return outputs_bytes - outputs_bytes // num_ranks if name == "broadcast_" else inputs_bytes
    return None


def copied_numel(name: str, overload: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the elements that an operator copies; 0 if it computes."""
    if name == "all_gather_copy_in":
        return _numel(args[0])  # a rank's shards go into the buffer that is gathered
    if name == "split_with_sizes_copy":
        return int(args[0].numel())
    if name == "_foreach_copy_":
        return _numel(args[0])
    if name in _COPIES or (name == "mul" and overload in ("out", "Scalar_out")):
        return _numel(kwargs.get("out", result if result is not None else args[0]))
    return 0


def asking_module() -> str:
    """Return the name of the innermost module on the stack, besides torch's and this one."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        name = str(frame.f_globals.get("__name__", ""))
        if name != __name__ and name.partition(".")[0] != _TORCH:
            return name
    return ""


def engine_copies(copied_by: Mapping[str, int]) -> int:
    """Count the elements that the engine's own code copies, outside of collectives."""
    return sum(numel for name, numel in copied_by.items() if name.startswith(ENGINE))


class MovedModel(TorchDispatchMode):
    """Counter of a block's operators, without those that tensor subclasses run inside theirs."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_ranks = num_ranks
        self._bytes: Counter[str] = Counter()
        self._copied: Counter[str] = Counter()

    @property
    def moved(self) -> Moved:
        """The counts so far."""
        sent = self._bytes.total()
        return Moved(
            sent,
            sent + sum(self._bytes[name] for name in _ONCE),
            self._copied.total(),
            sum(self._bytes[name] for name in _ONCE | _EXCHANGED | _REDUCED),
            dict(self._copied),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        library, name = func._schema.name.split("::")
        if library == "c10d":
            outputs, inputs = _outputs_and_inputs(name, args)
            sent = ring_bytes(name, inputs, outputs, self._num_ranks)
            if name == "alltoall_base_" and args[3]:
                sent = inputs  # sizes are given between two ranks, where a rank's own half is left out
            if sent is not None:
                self._bytes[name] += sent
        else:
            numel = copied_numel(name, func._overloadname, args, kwargs, result)
            if numel > 0:
                self._copied[asking_module()] += numel
        return result


def _outputs_and_inputs(name: str, args: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes of output and input, the first two arguments; in-place operators have one."""
    first = _nbytes(args[0])
    if name in _REDUCED or name in _SENT:
        return first, first
    return first, _nbytes(args[1])


def _nbytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _numel(value: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
