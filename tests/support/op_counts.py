"""Count what really runs: operators and collectives, seen by dispatch modes and not by the library's own counters."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

# These move no bytes of a model.
_SILENT_OPS = frozenset(
    ["view", "select", "unbind", "slice", "detach", "t", "transpose", "expand", "promote_types", "lift_fresh", "empty"]
)


GATHER, EXCHANGE, ALL_REDUCE = "_allgather_base_", "alltoall_base_", "allreduce_"
_REDUCE_SCATTER = "_reduce_scatter_base_"


@dataclass
class Collectives:
    """Collectives of one rank and the bytes it sends in them, by algorithms that reach the minimum (ring or pairwise).

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

    def count(self, name: str, args: tuple[Any, ...], num_ranks: int) -> None:
        """Take one operator of the c10d library into account."""
        if name == GATHER:
            self.gathers += 1
            self.gather_bytes += _sent_bytes(name, args, num_ranks)
        elif name in (EXCHANGE, _REDUCE_SCATTER, ALL_REDUCE):
            self.reductions += 1
            self.reduce_bytes += _sent_bytes(name, args, num_ranks)
        else:
            self.others.append(name)


class OpCounts(TorchDispatchMode):
    """Everything that passes the dispatcher inside the block.

    Args:
        num_ranks: Ranks of the group that collectives run on.

    Attributes:
        ops: How often each operator ran, by name and overload; views and the like left out.
        numels: For each operator, the elements of the first tensor, or list of tensors, of every call.
        collectives: What was sent.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.num_ranks = num_ranks
        self.ops: Counter[str] = Counter()
        self.numels: dict[str, list[int]] = {}
        self.collectives = Collectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        overload = func._overloadname
        if namespace == "c10d":
            self.collectives.count(name, args, self.num_ranks)
        elif name not in _SILENT_OPS:
            full_name = name if overload == "default" else f"{name}.{overload}"
            self.ops[full_name] += 1
            self.numels.setdefault(full_name, []).append(_numel_of_first(args))
        return func(*args, **(kwargs or {}))


def _numel_of_first(args: tuple[Any, ...]) -> int:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.numel()
        if isinstance(arg, list) and arg and isinstance(arg[0], torch.Tensor):
            return sum(tensor.numel() for tensor in arg)
    return 0


class GroupCounts(TorchDispatchMode):
    """Collectives inside the block, by group.

    Attributes:
        calls: How often each operator of the c10d library ran, by the group's name and the operator's.
        order: The same keys, one per call, as they were issued.
        sent_bytes: Bytes that this rank sends in them by algorithms that reach the minimum, by the same keys.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.calls: Counter[tuple[str, str]] = Counter()
        self.order: list[tuple[str, str]] = []
        self.sent_bytes: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            key = (group.group_name, name)
            self.calls[key] += 1
            self.order.append(key)
            self.sent_bytes[key] += _sent_bytes(name, args, group.size())
        return func(*args, **(kwargs or {}))

    def on(self, group: dist.ProcessGroup | None, *names: str) -> tuple[int, int]:
        """Calls and bytes of some operators, all where none is named, on a group (None: no group, nothing)."""
        keys = [
            key for key in self.calls if group is not None and key[0] == group.group_name and key[1] in (names or key)
        ]
        return sum(self.calls[key] for key in keys), sum(self.sent_bytes[key] for key in keys)


def _sent_bytes(name: str, args: Any, num_ranks: int) -> int:
    """By algorithms that reach the minimum."""
    if name == GATHER:
        return args[1].nbytes * (num_ranks - 1)  # each rank's shard reaches every other rank
    if name in (EXCHANGE, _REDUCE_SCATTER):
        return args[1].nbytes - args[1].nbytes // num_ranks
    if name == ALL_REDUCE:
        return sum(2 * (tensor.nbytes - tensor.nbytes // num_ranks) for tensor in args[0])
    raise ValueError(f"no count of what {name} sends; teach it to this function")
