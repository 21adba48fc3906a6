"""Compute weights in a weight format: the parameters that have one, and the bytes of a group's flat buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.engine.group_plan import is_tensor_extension
from megatron_fsdp.engine.memory import FlatBuffer
from megatron_fsdp.errors import ConfigurationError, warn_caller
from megatron_fsdp.sharding.layout import Layout
from megatron_fsdp.sharding.placement import Region
from megatron_fsdp.sharding.units import ParameterOwners, parameter_owners
from megatron_fsdp.sharding.weight_formats import WEIGHT_FORMATS, Fp8, Fp8Compute, WeightFormat, encoded_bytes

_CHUNK_NUMEL = 1 << 22  # elements that are decoded at a time, through float32; a multiple of every block
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MULTIPLIED, _DECODED = Fp8Compute().name, Fp8().name
"""The format that linears multiply, and the one of what no linear multiplies: it gathers the same bytes."""


def encoded_parameters(
    module: nn.Module, policy: MixedPrecisionPolicy, strategy: ShardingStrategy, *, keeps_transposed: bool = False
) -> dict[str, WeightFormat]:
    """Return the weight format of each parameter that has one, by name; the module is only read.

    Those with two dimensions or more do, but for embeddings and what is tied to one, and as the policy's patterns say.
    Where these say "fp8_compute", what no plain linear multiplies is decoded as "fp8". `strategy` is that on the
    sharding axis; `keeps_transposed`: "fp8_compute" keeps transposed codes (`keep_fp8_transpose_cache`).
    Refused are a format without sharded weights, and a pattern that takes effect on no parameter; keeping where nothing
    is transposed is warned of.
    """
    patterns, names = policy.weight_formats, [name for name, _ in module.named_parameters()]
    if keeps_transposed and _MULTIPLIED not in patterns.values():
        warn_caller(
            "keep_fp8_transpose_cache=True has no effect, since no linear multiplies float8 weights; set "
            f"MixedPrecisionPolicy(weight_format={_MULTIPLIED!r}), or leave it out"
        )
    if not patterns:
        return {}
    asked = f"weight_format={policy.weight_format!r}"
    if strategy is not ShardingStrategy.optim_grads_params:
        raise ConfigurationError(
            f"{asked} is a format of sharded weights, and strategy {strategy.name} keeps them whole; use "
            "zero_dp_strategy 3 (optim_grads_params) or leave it out"
        )
    chosen: dict[str, list[str]] = {pattern: [] for pattern in patterns}  # names whose first match it is
    found: dict[str, WeightFormat] = {}
    owners = parameter_owners(module)
    for name, param in module.named_parameters():
        pattern = next((each for each in patterns if fnmatchcase(name, each)), None)
        if pattern is None:
            continue
        chosen[pattern].append(name)
        form, at = patterns[pattern], owners[id(param)]
        is_looked_up = any(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner, _ in at)
        if form is None or is_looked_up or param.ndim < 2 or param.dtype not in _DTYPES or is_tensor_extension(param):
            continue
        made = WEIGHT_FORMATS[_DECODED if form == _MULTIPLIED and not _is_multiplied(param, at) else form]
        found[name] = replace(made, keeps_transposed=keeps_transposed) if isinstance(made, Fp8Compute) else made
    _check_patterns(asked, patterns, chosen, names, found)
    return found


def _check_patterns(
    asked: str,
    patterns: Mapping[str, str | None],
    chosen: Mapping[str, Sequence[str]],
    names: Sequence[str],
    found: Mapping[str, WeightFormat],
) -> None:
    """Raise if a pattern takes effect on no parameter."""
    for pattern, form in patterns.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(
                f"{asked} has {pattern!r}, which matches none of the {len(names)} parameters (such as "
                f"{', '.join(names[:2])}); patterns are those of fnmatch"
            )
        if not chosen[pattern]:
            raise ConfigurationError(
                f"{asked} has {pattern!r}, which has no effect, since an earlier pattern matches every parameter that "
                "it does, and the first one counts; put it before"
            )
        if form is not None and not any(name in found for name in chosen[pattern]):
            raise ConfigurationError(
                f"{asked} has {pattern!r}, which concerns no parameter: {', '.join(chosen[pattern][:2])} "
                f"{'and others ' * (len(chosen[pattern]) > 2)}are embeddings or tied to one, have fewer than two "
                "dimensions, another dtype or a class that gathers in its own way; leave it out"
            )
        if form == _MULTIPLIED and not any(name in found and found[name].stays_encoded for name in chosen[pattern]):
            raise ConfigurationError(
                f"{asked} has {pattern!r}, of whose parameters ({', '.join(chosen[pattern][:2])}"
                f"{', ...' * (len(chosen[pattern]) > 2)}) none is the weight of a plain torch.nn.Linear, which alone "
                "multiplies float8 weights (not a subclass, as with delay_wgrad_compute, nor a stack of experts); "
                f"give {_DECODED!r} there, to gather the same bytes and decode them"
            )


def _is_multiplied(param: torch.Tensor, owners: ParameterOwners) -> bool:
    """Return True if only linears, plain or cut by tensor parallelism, hold a parameter, as their weight."""
    is_cut = isinstance(param, DTensor) and all(placement.is_shard() for placement in param.placements)
    return (is_cut or type(param) in (nn.Parameter, FakeTensor)) and all(
        type(owner) is nn.Linear and attribute == "weight" and "forward" not in owner.__dict__
        for owner, attribute in owners
    )


class WeightQuantizer:
    """Encodes and decodes the tensors of one layout."""

    def __init__(self, weight_format: WeightFormat, layout: Layout, device: torch.device) -> None:
        self.format = weight_format
        self._layout = layout
        # float32, one of each tensor, if any: this rank's after `measure`, until ranks agree
        self.amaxes = torch.zeros(len(layout.shapes) if weight_format.agrees_on_amax else 0, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of amaxes and scales that are kept on the device."""
        return self.amaxes.nbytes

    def bytes_of(self, numel: int) -> int:
        """Return the bytes that `numel` elements of the buffer take."""
        return encoded_bytes(self.format, numel)

    def measure(self, main: FlatBuffer) -> None:
        """Set `amaxes` to those of this rank's shard."""
        for index in range(self.amaxes.numel()):
            self._own(self.amaxes, index).copy_(self.format.amax(main.local_shard(index).view(-1)))

    def is_finite(self, index: int) -> bool:
        """Return True if the amax of tensor `index` is finite."""
        return bool(self._own(self.amaxes, index).isfinite().all())

    def encode(self, local: torch.Tensor, region: Region, out: torch.Tensor) -> None:
        """Encode the elements `local` of a region into uint8 `out`."""
        scales = self.format.scales(self.amaxes)
        for index, shard, codes in self._chunks(region, local, out):
            values = shard.float() if shard.dtype is torch.float64 else shard
            self.format.encode(values, self._own(scales, index), codes)

    def decode(self, encoded: torch.Tensor, region: Region, out: torch.Tensor) -> None:
        """Decode the bytes of a region into `out` (region.numel,), whose last bytes `encoded` may be.

        A chunk's bytes lie at or behind its place in `out`, since no element takes more bytes encoded, and chunks come
        in the order of their places: so none is overwritten before it is read.
        """
        scales = self.format.scales(self.amaxes)
        for index, shard, codes in self._chunks(region, out, encoded):
            self.format.decode(codes, self._own(scales, index), shard)

    def round_into(self, local: torch.Tensor, region: Region, out: torch.Tensor) -> None:
        """Round the elements of a region as encoding and decoding do."""
        encoded = torch.zeros(self.bytes_of(region.numel), dtype=torch.uint8, device=local.device)
        self.encode(local, region, encoded)
        self.decode(encoded, region, out)

    def _chunks(
        self, region: Region, local: torch.Tensor, encoded: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Iterate over parts of a region, in the order of their places.

        Of each come the index of its tensor, and views of its elements and of its bytes.
        """
        offsets = self._layout.offsets
        for index in sorted(range(len(offsets)), key=offsets.__getitem__):
            start, stop = self._layout.range_in(index, region)
            for first in range(start, stop, _CHUNK_NUMEL):
                numel, place = min(_CHUNK_NUMEL, stop - first), offsets[index] + first - region.start
                codes = encoded[self.bytes_of(place) :][: self.bytes_of(numel)]
                yield index, local[place : place + numel], codes

    def _own(self, shared: torch.Tensor, index: int) -> torch.Tensor:
        """Return the amax or scale of tensor `index`, (1,)."""
        return shared[index : index + 1]


class WrappingQuantizer(WeightQuantizer):
    """A quantizer of a format that stays encoded: modules compute with tensors around gathered bytes."""

    @abstractmethod
    def codes_in(self, full: torch.Tensor, index: int) -> Any:
        """Return the codes of tensor `index` as views of gathered bytes without their version."""

    @abstractmethod
    def blank_codes(self, index: int) -> Any:
        """Return placeholders without memory, shaped as the codes of tensor `index`."""

    @abstractmethod
    def wrap(self, index: int, codes: Any) -> torch.Tensor:
        """Return the tensor that modules compute with, around codes of tensor `index`."""

    @abstractmethod
    def point(self, index: int, made: Any, codes: Any) -> None:
        """Re-point a wrapped tensor at new codes."""

    @abstractmethod
    def update(self, index: int, made: Any, full: torch.Tensor) -> None:
        """Renew a wrapped tensor after an all-gather of its codes in `full`."""

    def release(self, made: Any) -> None:
        """Release a wrapped tensor, whose codes are resharded."""


class EncodedBuffer(FlatBuffer):
    """A region of a flat buffer as the bytes of a weight format; `local` is uint8, zeros where no tensor is."""

    def __init__(self, quantizer: WeightQuantizer, layout: Layout, region: Region, local: torch.Tensor) -> None:
        super().__init__(layout, region, local)
        self._quantizer = quantizer

    def view_of(self, region: Region) -> torch.Tensor:
        """Return the bytes of a region inside of this one."""
        inside = region.within(self.region)
        return self.local[self._quantizer.bytes_of(inside.start) : self._quantizer.bytes_of(inside.stop)]
