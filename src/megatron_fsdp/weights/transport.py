"""A reference transport in vLLM's packed layout, over gloo and NCCL: to test with, and to copy from.

Tensors travel as flat bytes, one after another in the order of the metadata. A chunk ends with the tensor that makes it
larger than the limit, so both sides have to know the same limit: the sender's travels with the names.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.hf.live import unwrap
from megatron_fsdp.comm.agreement import all_agree
from megatron_fsdp.errors import ConfigurationError, RankError, text_of
from megatron_fsdp.optional_packages import require
from megatron_fsdp.weights.source import Named, WeightSource

Info = Mapping[str, Any]
"""Names, dtype names, shapes, the limit of a chunk and the version: the argument of `on_update`."""


def stateless_group(
    host: str, port: int, rank: int, size: int, backend: str = "gloo", timeout_s: float = 300.0
) -> dist.ProcessGroup:
    """Make a group of the sender (rank 0) and the engine's workers, beside the default group of either. Collective.

    Args:
        host: Of the sender, where it listens.
        port: A free one there.
        rank: 0 for the sender, then the workers.
        size: The sender and all workers.
        backend: "gloo" or "nccl".
        timeout_s: The most that anything waits.

    Raises:
        ConfigurationError: The back end is another one.
    """
    if backend not in ("gloo", "nccl"):
        raise ConfigurationError(f"backend={backend!r} is unknown; give 'gloo' or 'nccl'")
    limit = timedelta(seconds=timeout_s)
    torch_dist: Any = dist
    store = torch_dist.TCPStore(host, port, size, is_master=rank == 0, timeout=limit)
    if backend == "gloo":
        made = torch_dist.ProcessGroupGloo(store, rank, size, limit)
    else:
        options = torch_dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        made = torch_dist.ProcessGroupNCCL(store, rank, size, options)
    return cast("dist.ProcessGroup", made)


def send(
    source: WeightSource,
    group: dist.ProcessGroup | None,
    *,
    packed_bytes: int = 2**30,
    on_start: Callable[[], object] | None = None,
    on_update: Callable[[Info], object] | None = None,
    on_finish: Callable[[str], object] | None = None,
) -> str:
    """Send a full pass to an engine; every rank of the model calls it, the sender with a group and callbacks.

    Args:
        source: Each rank's own; give it the sender as destination, so that only that one holds buckets.
        group: Of `stateless_group`, on the sender; None on the other ranks.
        packed_bytes: The size beyond which a chunk ends.
        on_start: Called before the first gather: `start_weight_update` of the engine.
        on_update: Called with what the engine has to know to receive; must not wait until it has.
        on_finish: Called with the version, once everything was sent: `finish_weight_update`. Not after an error, so
            that the engine's version stays what it was.

    Returns:
        The version that was sent.

    Raises:
        RankError: The sender could not go on: names rank, error and last tensor, on all ranks.
    """
    version = source.label
    with all_agree("beginning to send weights", source.ranks):
        info = {**source.update_info(), "packed_bytes": packed_bytes, "version": version}
        if on_start is not None:
            on_start()
        if on_update is not None:
            on_update(info)
        sizes = [meta.nbytes for meta in source.metadata()]
        chunks = list(_chunks(sizes, packed_bytes))
    tensors: Any = iter(source)
    sent = 0
    for start, stop in chunks:
        parts = [next(tensors) for _ in range(start, stop)]
        if group is not None:
            try:
                chunk = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in parts if tensor is not None])
                group.broadcast([chunk], _from_first()).wait()
            except Exception as error:  # noqa: BLE001  told to the others
                last = f"{sent} of {len(sizes)} tensors were sent, the last before {parts[0][0]}"
                tensors.throw(RankError(f"{last}: {text_of(error)}"))
            sent += len(parts)
        del parts
    next(tensors, None)
    with all_agree("finishing to send weights", source.ranks):
        if on_finish is not None:
            on_finish(version)
    return version


def receive(
    group: dist.ProcessGroup,
    info: Info,
    load: Callable[[str, torch.Tensor], object],
    device: torch.device | str = "cpu",
) -> None:
    """Receive the tensors of `send` on a worker, on the device of the group; `load` gets each name and tensor."""
    dtypes = [getattr(torch, name) for name in info["dtype_names"]]
    described = list(zip(info["names"], dtypes, map(tuple, info["shapes"]), strict=True))
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in described]
    for start, stop in _chunks(sizes, info["packed_bytes"]):
        chunk = torch.empty(sum(sizes[start:stop]), dtype=torch.uint8, device=device)
        group.broadcast([chunk], _from_first()).wait()
        for (name, dtype, shape), part in zip(described[start:stop], chunk.split(sizes[start:stop]), strict=True):
            load(name, part.clone().view(dtype).view(shape))  # cloned: it may begin anywhere in the chunk


def _chunks(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Iterate over the ranges of tensors that make up a chunk."""
    start, filled = 0, 0
    for at, size in enumerate(sizes):
        filled += size
        if filled > limit or at == len(sizes) - 1:
            yield start, at + 1
            start, filled = at + 1, 0


def _from_first() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def for_vllm(source: WeightSource) -> Any:
    """Return the source as an instance of vLLM's own `WeightSource`, where a back end asks for that.

    Raises:
        MissingPackageError: vLLM is not installed.
    """
    require("vllm", "for_vllm", "give the source itself: most back ends take what has its methods")
    transfer: Any = importlib.import_module("vllm.distributed.weight_transfer")

    class ForVllm(transfer.WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [transfer.ParamMeta(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]

        def __iter__(self) -> Iterator[Named]:
            return iter(source)

        def held_names(self) -> Collection[str] | None:
            return source.held_names()

        def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
            return source.iter_groups()

    return ForVllm()


def per_tensor_params(model: nn.Module, **arguments: Any) -> tuple[Iterator[Named], dict[str, Any] | None]:
    """Return an iterator of names with whole tensors, and the config of adapters sent alone, as verl's engines do.

    `arguments` are those of `WeightSource`.
    """
    config = None
    if arguments.get("adapters") == "only":
        module: Any = unwrap(model)
        config = module.peft_config[module.active_adapter].to_dict()
    return iter(WeightSource(model, **arguments)), config
