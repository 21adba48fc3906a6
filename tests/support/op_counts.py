"""Count what really runs: operators and collectives, seen by a dispatch mode and not by the library's own counters."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

# These move no bytes of a model.
_SILENT_OPS = frozenset(
    ["view", "select", "unbind", "slice", "detach", "t", "transpose", "expand", "promote_types", "lift_fresh", "empty"]
)

GATHER, EXCHANGE, ALL_REDUCE = "_allgather_base_", "alltoall_base_", "allreduce_"
_REDUCTIONS = (EXCHANGE, "_reduce_scatter_base_", ALL_REDUCE)


class Sent(NamedTuple):
    """One collective: the name of its group, its operator of the c10d library, and the bytes that this rank sends.

    Bytes are those of algorithms that reach the minimum (ring or pairwise), and 0 of operators that this file does not
    know.
    """

    group: str
    name: str
    num_bytes: int


@dataclass
class Collectives:
    """Collectives of one rank and the bytes it sends in them.

    Attributes:
        gathers: Number of all-gathers.
        reductions: Number of all-to-alls, reduce-scatters and all-reduces.
        others: Names of all other collectives.
        gather_bytes: Bytes sent in all-gathers.
        reduce_bytes: Bytes sent in the others.
    """

    gathers: int = 0
    reductions: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0
    others: list[str] = field(default_factory=list)


class OpCounts(TorchDispatchMode):
    """Everything that passes the dispatcher inside the block.

    Attributes:
        ops: How often each operator ran, by name and overload; collectives, views and the like left out.
        numels: For each operator, the elements of the first tensor, or list of tensors, of every call.
        sent: Collectives, as they were issued.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.ops: Counter[str] = Counter()
        self.numels: dict[str, list[int]] = {}
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        overload = func._overloadname
        if namespace == "c10d":
            group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            self.sent.append(Sent(group.group_name, name, _sent_bytes(name, args, group.size())))
        elif name not in _SILENT_OPS:
            full_name = name if overload == "default" else f"{name}.{overload}"
            self.ops[full_name] += 1
            self.numels.setdefault(full_name, []).append(_numel_of_first(args))
        return func(*args, **(kwargs or {}))

    @property
    def collectives(self) -> Collectives:
        """What was sent on all groups."""
        gathers = [each.num_bytes for each in self.sent if each.name == GATHER]
        reductions = [each.num_bytes for each in self.sent if each.name in _REDUCTIONS]
        others = [each.name for each in self.sent if each.name not in (GATHER, *_REDUCTIONS)]
        return Collectives(len(gathers), len(reductions), sum(gathers), sum(reductions), others)

    def on(self, group: dist.ProcessGroup | None, *names: str) -> tuple[int, int]:
        """Calls and bytes of some operators, all where none is named, on a group (None: no group, nothing)."""
        found = [
            each.num_bytes
            for each in self.sent
            if group is not None and each.group == group.group_name and (not names or each.name in names)
        ]
        return len(found), sum(found)


def _numel_of_first(args: tuple[Any, ...]) -> int:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.numel()
        if isinstance(arg, list) and arg and isinstance(arg[0], torch.Tensor):
            return sum(tensor.numel() for tensor in arg)
    return 0


def _sent_bytes(name: str, args: Any, num_ranks: int) -> int:
    if name == GATHER:
        return args[1].nbytes * (num_ranks - 1)  # each rank's shard reaches every other rank
    if name == ALL_REDUCE:
        return sum(2 * (tensor.nbytes - tensor.nbytes // num_ranks) for tensor in args[0])
    return args[1].nbytes - args[1].nbytes // num_ranks if name in _REDUCTIONS else 0
