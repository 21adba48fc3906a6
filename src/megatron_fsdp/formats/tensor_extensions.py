"""Tensor extensions: parameters whose tensor class encodes its own shards and wraps gathered codes.

That is PyTorch's extension of FSDP2, which the float8 weights of torchao implement:

    fsdp_pre_all_gather(mesh) -> (tensors to gather,), metadata              a shard is whole rows
    fsdp_post_all_gather(gathered, metadata, dtype) -> tensor, its inner ones
    fsdp_post_all_gather(gathered, metadata, dtype, out=tensor)              out: what the first call returned

Here an extension has to be plain values with a way to encode them: it flattens into one tensor of its own shape and
dtype, which is sharded as any other, and encodes it into one tensor of that shape, or into several, each with as many
rows and a byte an element (codes and scales of a row, say). They are gathered in place, and modules compute with the
tensor that `fsdp_post_all_gather` makes around them. Several lie row by row beside each other, so that each is a
strided view.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.dtensor.shard_spec import GATHER_METHODS
from megatron_fsdp.engine.memory import shard_view
from megatron_fsdp.engine.plans import GroupPlan, ModelSharding
from megatron_fsdp.engine.weight_quantizer import WrappingQuantizer
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.placement import Region
from megatron_fsdp.sharding.weight_formats import ExtensionFormat


@dataclass(frozen=True)
class TensorExtension:
    """A tensor class around plain values."""

    kind: Any  # the class
    inner: str  # name of the attribute with the values
    context: object  # what else it flattens into
    shape: torch.Size
    module: nn.Module  # the one that holds it

    def __str__(self) -> str:
        """Return the class and its context, which have to be the same on all ranks."""
        return f"{self.kind.__name__} ({self.context})"

    def around(self, rows: torch.Tensor) -> Any:
        """Return rows (n, *rest) as a tensor of the class."""
        return self.kind.__tensor_unflatten__({self.inner: rows}, self.context, rows.size(), rows.stride())

    def blank_row(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a row of zeros, the proxy for a shard on ranks without one."""
        return torch.zeros(1, *self.shape[1:], dtype=dtype, device=device)

    def encode(self, rows: torch.Tensor, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], object]:
        """Encode rows (n, *rest), at least one; return their codes (n, ...) and metadata; may communicate."""
        method = self.around(rows).fsdp_pre_all_gather
        given: tuple[Any, ...] = (mesh,)
        if len(inspect.signature(method).parameters) > 1:
            stride = torch.empty(self.shape, device="meta").stride()
            given = (mesh, self.shape, stride, self.module, MixedPrecisionPolicy(param_dtype=rows.dtype))
        tensors, metadata = method(*given)
        is_one = len(tensors) == 1 and tensors[0].shape == rows.shape
        if not is_one and not all(each.shape[:1] == rows.shape[:1] and each.itemsize == 1 for each in tensors):
            raise self._refusal(tensors, rows)
        return tuple(each.detach() for each in tensors), metadata

    def _refusal(self, tensors: Sequence[torch.Tensor], rows: torch.Tensor) -> ConfigurationError:
        wanted = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in tensors)
        return ConfigurationError(
            f"fsdp_pre_all_gather of {self.kind.__name__} wants {len(tensors)} tensors gathered, {wanted}, for rows of "
            f"shape {tuple(rows.shape)}; one of the same shape can be, or several with as many rows and a byte an "
            "element (what concerns the whole tensor belongs into the metadata): give a plain parameter, and "
            "MixedPrecisionPolicy(weight_format=...)"
        )


def tensor_extension_of(name: str, param: torch.Tensor, module: nn.Module) -> TensorExtension | None:
    """Return the tensor extension of a parameter; None for a parameter of any other class.

    A class that lacks a method, or is more than plain values, is refused.
    """
    values: Any = param
    kind: Any = type(param)
    found = [method for method in GATHER_METHODS if hasattr(kind, method)]
    if not found:
        return None
    if len(found) == 1:
        missing = next(method for method in GATHER_METHODS if method not in found)
        raise ConfigurationError(
            f"{name} is a {kind.__name__} with {found[0]} and without {missing}; a tensor class that is gathered in "
            "its own way needs both: give a plain parameter"
        )
    inner, context = values.__tensor_flatten__() if hasattr(kind, "__tensor_flatten__") else (list[str](), None)
    plain = [getattr(values, each) for each in inner]
    if len(plain) != 1 or type(plain[0]) not in (torch.Tensor, nn.Parameter) or plain[0].shape != values.shape:
        raise ConfigurationError(
            f"{name} is a {kind.__name__}, which is gathered in its own way and does not flatten into one plain tensor "
            f"of its shape but into {', '.join(inner) or 'nothing'}; give a plain parameter, and "
            "MixedPrecisionPolicy(weight_format=...) to gather it in few bytes"
        )
    return TensorExtension(kind, inner[0], context, values.shape, module)


def find_tensor_extensions(module: nn.Module, sharding: ModelSharding) -> dict[str, TensorExtension]:
    """Return the parameters that are extensions, by name; the module is only read.

    Raises:
        ConfigurationError: They would not be sharded at whole rows, or not all-gathered.
    """
    owners = {id(param): owner for owner in module.modules() for param in owner.parameters(recurse=False)}
    found = {name: tensor_extension_of(name, param, owners[id(param)]) for name, param in module.named_parameters()}
    extensions = {name: extension for name, extension in found.items() if extension is not None}
    options, reason = sharding.options, None
    if not (strategy := min(options.strategies)).shards_compute_weights:
        reason = f"with strategy {strategy.name}, which gathers none; use zero_dp_strategy 3"
    elif sharding.dense.rank_mesh.tensor_parallel is not None or sharding.experts is not None:
        reason = "beside tensor or expert parallelism, whose ranks would have to agree on its scales, too"
    elif len(sharding.dense.rank_mesh.axes) > 1 and options.outer_strategy is not ShardingStrategy.no_shard:
        reason = "with main weights that outer ranks share out; use outer_dp_sharding_strategy 0"
    elif options.offload.main_weights or options.offload.compute_weights:
        reason = "with offloaded weights; leave offload out"
    if reason is not None and extensions:
        name, extension = next(iter(extensions.items()))
        raise ConfigurationError(
            f"{name} is a {extension.kind.__name__}, which is gathered in its own way; this cannot be done {reason}, "
            "or give a plain parameter"
        )
    return extensions


def extension_format(extension: TensorExtension, param: torch.Tensor, mesh: DeviceMesh) -> ExtensionFormat:
    """Find the bytes of an extension's row by encoding one of zeros; may communicate."""
    codes, _ = extension.encode(extension.blank_row(param.dtype, param.device), mesh)
    row_numel, row_bytes = max(1, prod(extension.shape[1:])), sum(each.nbytes for each in codes)
    shared = gcd(row_numel, row_bytes)
    return ExtensionFormat(extension.kind.__name__, block_numel=row_numel // shared, block_bytes=row_bytes // shared)


@dataclass(frozen=True)
class _Codes:
    """One tensor of an encoded extension: its place in the bytes of a row, and shape and dtype of its rows."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view_in(self, rows: torch.Tensor) -> torch.Tensor:
        """Return it as a view of bytes (n, row bytes)."""
        found = rows[:, self.start : self.stop].view(self.dtype)
        return found.unflatten(1, self.shape) if self.shape else found.squeeze(1)


class ExtensionQuantizer(WrappingQuantizer):
    """Encodes and wraps the tensors of one layout, all of them extensions."""

    def __init__(self, plan: GroupPlan, extensions: Sequence[TensorExtension]) -> None:
        """Encode a row of zeros by each extension, for metadata before weights are installed."""
        assert isinstance(plan.weight_format, ExtensionFormat)
        super().__init__(plan.weight_format, plan.layout, plan.device)
        self._dtype, self._extensions = plan.precision.compute, extensions
        mesh = plan.rank_mesh.described_mesh
        names = mesh.mesh_dim_names
        self._mesh = mesh if names is None or mesh.ndim == 1 else mesh[names[-1]]
        blanks = [extension.blank_row(self._dtype, plan.device) for extension in extensions]
        encoded = [extension.encode(row, self._mesh) for extension, row in zip(extensions, blanks, strict=True)]
        self._metadata = [metadata for _, metadata in encoded]
        self._parts = [_parts_of(codes) for codes, _ in encoded]
        self._finish = [
            extension.around(row).fsdp_post_all_gather for extension, row in zip(extensions, blanks, strict=True)
        ]  # called in every gather

    def encode(self, local: torch.Tensor, region: Region, out: torch.Tensor) -> None:
        """Encode the elements `local` of a region, whole rows, into uint8 `out`; may communicate."""
        for index, extension in enumerate(self._extensions):
            shard = shard_view(self._layout, region, local, index).to(self._dtype)
            is_empty = not shard.numel()  # a class may look for the largest element, and all ranks have to take part
            rows = extension.blank_row(self._dtype, local.device) if is_empty else shard
            codes, self._metadata[index] = extension.encode(rows, self._mesh)
            if not is_empty:
                start, stop, _ = self._layout.shards_in(region)[index]
                for part, each in zip(self._parts[index], codes, strict=True):
                    part.view_in(self._rows(out, index, start, stop)).copy_(each)

    def decode(self, encoded: torch.Tensor, region: Region, out: torch.Tensor) -> None:
        """Leave the bytes as they are: modules compute with the codes."""

    def round_into(self, local: torch.Tensor, region: Region, out: torch.Tensor) -> None:
        """Leave the elements of `out` as they are: a module encodes plain weights itself."""

    def codes_in(self, full: torch.Tensor, index: int) -> tuple[torch.Tensor, ...]:
        """Return the codes of tensor `index` as views of gathered bytes without their version."""
        rows = self._rows(full, index, *self._layout.tensor_range(index))
        return tuple(part.view_in(rows).data for part in self._parts[index])

    def blank_codes(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return placeholders without memory, shaped as the codes of tensor `index`."""
        length, device = self._layout.shapes[index][0], self.amaxes.device
        return tuple(
            torch.zeros((), dtype=part.dtype, device=device).expand(length, *part.shape) for part in self._parts[index]
        )

    def wrap(self, index: int, codes: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the tensor that modules compute with, around codes of tensor `index`."""
        made, _ = self._finish[index](codes, self._metadata[index], self._dtype)
        if not hasattr(made, "__tensor_flatten__"):
            raise ConfigurationError(
                f"fsdp_post_all_gather of {self._extensions[index].kind.__name__} returns a {type(made).__name__}, "
                "with "
                "memory of its own beside what was gathered; it has to return a tensor class around that "
                "(__tensor_flatten__): give a plain parameter, and MixedPrecisionPolicy(weight_format=...) to gather "
                "it in few bytes"
            )
        return made

    def point(self, index: int, made: torch.Tensor, codes: tuple[torch.Tensor, ...]) -> None:
        """Re-point a wrapped tensor at new codes."""
        other: Any = self.wrap(index, codes)
        for name in other.__tensor_flatten__()[0]:
            setattr(made, name, getattr(other, name))

    def update(self, index: int, made: torch.Tensor, full: torch.Tensor) -> None:
        """Renew a wrapped tensor after an all-gather of its codes in `full`."""
        self._finish[index](self.codes_in(full, index), self._metadata[index], self._dtype, out=made)

    def _rows(self, encoded: torch.Tensor, index: int, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of elements `start` to `stop`, whole rows of tensor `index`, as (rows, row bytes)."""
        return encoded[self.bytes_of(start) : self.bytes_of(stop)].view(-1, self._parts[index][-1].stop)


def _parts_of(codes: Sequence[torch.Tensor]) -> tuple[_Codes, ...]:
    """Describe the tensors into which an extension has encoded a row."""
    ends = (0, *accumulate(each.nbytes for each in codes))
    return tuple(
        _Codes(start, stop, tuple(each.shape[1:]), each.dtype)
        for each, (start, stop) in zip(codes, pairwise(ends), strict=True)
    )
