"""What really runs and what is alive, seen by dispatch modes: operators, collectives, and bytes at a peak and now."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_fsdp.comm import collectives
from megatron_fsdp.comm.collectives import Traffic
from tests.support.settling import steady


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operator makes inside the block until it dies; `peak_bytes` is the most at a time.

    Storages from before the block are not counted, but those that are resized in it are as far as they grow or shrink.
    Operators that run inside those of tensor subclasses are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._before_bytes = 0

    @property
    def now_bytes(self) -> int:
        storages = [reference() for reference in self._known.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None) - self._before_bytes

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            if storage._cdata not in self._known:
                self._before_bytes += storage.nbytes()
                self._follow(storage)
            resized = resize(storage, num_bytes)
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            return resized

        self._patch = patch.object(torch.UntypedStorage, "resize_", resize_)
        self._patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in inputs and storage._cdata not in self._known:
                self._follow(storage)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key))


def held_bytes(collect: bool = True) -> int:
    """Bytes of all storages that some tensor object of this process refers to; `collect`: garbage does not count."""
    if collect:
        gc.collect()
    return steady(_held_now) if collect else _held_now()


def _held_now() -> int:
    found = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]  # proxies lie to isinstance
    return sum({storage._cdata: storage.nbytes() for storage in _storages(found)}.values())


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, DTensor):
            leaf = leaf._local_tensor
        is_plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided
        if is_plain and not leaf.is_meta:
            yield leaf.untyped_storage()


def on_meta(value: Any) -> Any:
    return tree_map(lambda tensor: tensor.to("meta"), value)


def token_batch() -> dict[str, Tensor]:
    """Inputs of a causal language model of transformers, with labels."""
    ids = torch.arange(32).view(2, 16) * 7 % 100
    return {"input_ids": ids, "labels": ids}


# These move no bytes of a model.
_SILENT_OPS = frozenset(
    ["view", "select", "unbind", "slice", "detach", "t", "transpose", "expand", "promote_types", "lift_fresh", "empty"]
)

GATHER, EXCHANGE, ALL_REDUCE = "_allgather_base_", "alltoall_base_", "allreduce_"
_REDUCTIONS = (EXCHANGE, "_reduce_scatter_base_", ALL_REDUCE)


class Sent(NamedTuple):
    group: str
    name: str  # of its operator of the c10d library
    num_bytes: int  # that this rank sends by an algorithm that reaches the minimum; 0 of operators not known here


@dataclass
class Collectives(Traffic):
    """What really ran: gathers, reductions (all-to-alls, reduce-scatters, all-reduces), and the names of all others."""

    others: list[str] = field(default_factory=list)


class OpCounts(TorchDispatchMode):
    """Everything that passes the dispatcher inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        # By operator, of the first tensor, or list of tensors, of every call; collectives, views and the like left out.
        self.numels: dict[str, list[int]] = {}
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            if name != "broadcast_" or not is_of_gather():
                self.sent.append(Sent(group.group_name, name, _sent_bytes(name, args, group.size())))
            elif own_part(args) is not None:
                self.sent.append(Sent(group.group_name, GATHER, own_part(args).nbytes * (group.size() - 1)))
        elif name not in _SILENT_OPS:
            tensors = ([leaf.numel() for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args)
            calls = self.numels.setdefault(func.name().partition("::")[2], [])
            calls.append(next((sum(each) for each in tensors if each), 0))
        return func(*args, **(kwargs or {}))

    @property
    def ops(self) -> Counter[str]:
        return Counter({name: len(calls) for name, calls in self.numels.items()})

    @property
    def collectives(self) -> Collectives:
        gathers = [each.num_bytes for each in self.sent if each.name == GATHER]
        reductions = [each.num_bytes for each in self.sent if each.name in _REDUCTIONS]
        others = [each.name for each in self.sent if each.name not in (GATHER, *_REDUCTIONS)]
        return Collectives(len(gathers), len(reductions), sum(gathers), sum(reductions), others)

    def on(self, group: ProcessGroup | None, *names: str) -> tuple[int, int]:
        """Calls and bytes of some operators, all where none is named, on a group (None: no group, nothing)."""
        on_group = [each for each in self.sent if group is not None and each.group == group.group_name]
        found = [each.num_bytes for each in on_group if not names or each.name in names]
        return len(found), sum(found)


def own_part(broadcast: Any) -> Any:
    """The part of an all-gather that this rank broadcasts, by the operator's arguments; None: it receives.

    An all-gather on few ranks over gloo is a broadcast by each of them, and counts once: here.
    """
    tensors, group, source, *_ = broadcast
    return tensors[0] if ProcessGroup.unbox(group).rank() == source else None


def is_of_gather() -> bool:
    """Whether what is dispatched now is one of the broadcasts of an all-gather."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not collectives._gather_by_broadcasts.__code__:
        frame = frame.f_back
    return frame is not None


def _sent_bytes(name: str, args: Any, num_ranks: int) -> int:
    if name == GATHER:
        return args[1].nbytes * (num_ranks - 1)  # each rank's shard reaches every other rank
    if name == ALL_REDUCE:
        return sum(2 * (tensor.nbytes - tensor.nbytes // num_ranks) for tensor in args[0])
    if name == EXCHANGE and args[3]:
        return args[1].nbytes  # sizes are given between two ranks, where a rank's own half is left out
    return args[1].nbytes - args[1].nbytes // num_ranks if name in _REDUCTIONS else 0
