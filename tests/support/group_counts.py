"""Which collectives run on which ranks, seen below the library by a dispatch mode."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode


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
    if name == "_allgather_base_":
        return args[1].nbytes * (num_ranks - 1)
    if name in ("alltoall_base_", "_reduce_scatter_base_"):
        return args[1].nbytes - args[1].nbytes // num_ranks
    if name == "allreduce_":
        return sum(2 * (tensor.nbytes - tensor.nbytes // num_ranks) for tensor in args[0])
    raise ValueError(f"no count of what {name} sends; teach it to this function")


GATHER = "_allgather_base_"
EXCHANGE = "alltoall_base_"
ALL_REDUCE = "allreduce_"
