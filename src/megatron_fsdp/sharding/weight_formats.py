"""Weight formats: round weights and pack them into bytes before they are gathered.

An encoded buffer is a linear image of the flat buffer: every `block_numel` elements become `block_bytes` bytes (a
block's own scale, if it has one, and codes). So `gather(encode(x))` is `encode(gather(x))` for any cut between blocks.
What more elements than a block share (the amax of a tensor) ranks agree on beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_E8M0_BIAS = 127  # as in float32
_E2M1_MAX = 6.0
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BELOW = 1 - 2.0**-24  # times a power of two or a short fraction: the next smaller float32
_E2M1_ENDS = (0.25, 0.75 * _BELOW, 1.25, 1.75 * _BELOW, 2.5, 3.5 * _BELOW, 5.0)
"""The largest float32 that rounds to each of the seven smallest magnitudes: a tie goes to the even code."""
_LEAST_SCALE = 2.0**-126  # the smallest normal float32: all-zero tensors divide by it


def encoded_bytes(weight_format: WeightFormat, numel: int) -> int:
    """Return the encoded size of `numel` elements, in bytes."""
    return -(-numel // weight_format.block_numel) * weight_format.block_bytes


def scale_to(largest: float, amaxes: Tensor) -> Tensor:
    """Return the scales, float32, that map codes up to `largest` to values up to `amaxes`."""
    return (amaxes / largest).clamp_min_(_LEAST_SCALE)


def amaxes_of(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the amax of all elements, or along a dimension, which is kept; float32, NaN if any element is NaN.

    Values are read once and not copied, which `values.abs().amax()` does.
    """
    low, high = torch.aminmax(values) if dim is None else torch.aminmax(values, dim=dim, keepdim=True)
    return torch.maximum(low.abs(), high.abs()).float()


@dataclass(frozen=True)
class WeightFormat:
    """Base class of the formats: encodes and decodes local shards of flattened tensors, without communication.

    A shard is a run of elements of a flattened tensor that begins at a block. Blocks go along the flattened tensor;
    zeros fill the last.
    """

    name: str  # what users call it
    block_numel: int = 1  # elements that are encoded together, which no cut may separate
    block_bytes: int = 1
    largest: float = _E4M3_MAX  # what the amax of a tensor is encoded as

    @property
    def stays_encoded(self) -> bool:
        """True if modules compute with the gathered bytes as they are."""
        return False

    @property
    def cuts_rows(self) -> bool:
        """True if a shard may begin inside a row, between two blocks."""
        return True

    @property
    def agrees_on_amax(self) -> bool:
        """True if the amax of each tensor is reduced over ranks."""
        return True

    def amax(self, shard: Tensor) -> Tensor:
        """Return the amax of a local shard (n,), float32 (1,): 0 for an empty one, infinity for NaN."""
        if not shard.numel():
            return torch.zeros(1, device=shard.device)
        return amaxes_of(shard).view(1).nan_to_num_(inf, inf)

    def scales(self, amaxes: Tensor) -> Tensor:
        """Return the scales of reduced amaxes."""
        return scale_to(self.largest, amaxes)

    def encode(self, shard: Tensor, scale: Tensor, out: Tensor) -> None:
        """Encode a shard (n,), float32 or narrower, into `out`, uint8 (encoded_bytes(n),), rounding to the nearest.

        `scale`, (1,), is that of an agreed, finite amax.
        """
        raise NotImplementedError

    def decode(self, encoded: Tensor, scale: Tensor, out: Tensor) -> None:
        """Decode uint8 (encoded_bytes(n),) into `out` (n,), rounding once; the two may share memory."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """e4m3 with one float32 scale per tensor, its amax / 448."""

    name: str = "fp8"

    def encode(self, shard: Tensor, scale: Tensor, out: Tensor) -> None:
        """Divide each element by the scale and round to the nearest e4m3."""
        # Rounding alone leaves a quotient beyond 448, far from 464, from where on conversion would return NaN.
        torch.div(shard, scale, out=out.view(_E4M3))

    def decode(self, encoded: Tensor, scale: Tensor, out: Tensor) -> None:
        """Multiply each element by the scale in float32 and round once."""
        _multiply(encoded.view(_E4M3).to(out.dtype), scale, out)


@dataclass(frozen=True)
class Fp8Compute(Fp8):
    """The bytes of "fp8", which linears multiply as they are gathered (`megatron_fsdp.formats.fp8_linear`)."""

    name: str = "fp8_compute"
    keeps_transposed: bool = False  # the transposed codes that backward multiplies are kept while weights are gathered

    @property
    def stays_encoded(self) -> bool:
        """True if modules compute with the gathered bytes as they are."""
        return True


@dataclass(frozen=True)
class Mxfp8(WeightFormat):
    """e4m3 in blocks of 32 with a power of two as scale (e8m0), the least that keeps the block within 448.

    Ranks agree on an amax per tensor only to find NaN and infinity.
    """

    name: str = "mxfp8"
    block_numel: int = 32
    block_bytes: int = 33

    def encode(self, shard: Tensor, scale: Tensor, out: Tensor) -> None:  # noqa: ARG002
        """Divide each block by its scale and round to the nearest e4m3."""
        blocks, rows = _in_blocks(shard, self.block_numel), out.view(-1, self.block_bytes)
        fraction, exponents = torch.frexp(amaxes_of(blocks, 1) / _E4M3_MAX)
        # Rounded up to the next power of two.
        codes = (exponents + (fraction != 0.5) + (_E8M0_BIAS - 1)).clamp_(1, 2 * _E8M0_BIAS)
        rows[:, :1] = codes
        torch.mul(blocks, _powers(2 * _E8M0_BIAS - codes), out=rows[:, 1:].view(_E4M3))

    def decode(self, encoded: Tensor, scale: Tensor, out: Tensor) -> None:  # noqa: ARG002
        """Multiply each block by its scale in float32 and round once."""
        rows = encoded.view(-1, self.block_bytes)
        _multiply(rows[:, 1:].view(_E4M3).to(out.dtype), _powers(rows[:, :1].int()), out)


@dataclass(frozen=True)
class Nvfp4(WeightFormat):
    """e2m1, two in a byte, in blocks of 16 with an e4m3 scale each, and one float32 scale per tensor.

    The scale of the tensor is its amax / (6 * 448); that of a block makes its largest element 6.
    """

    name: str = "nvfp4"
    block_numel: int = 16
    block_bytes: int = 9
    largest: float = _E2M1_MAX * _E4M3_MAX

    def encode(self, shard: Tensor, scale: Tensor, out: Tensor) -> None:
        """Divide each block by both scales and round to the nearest e2m1, ties to even."""
        blocks, rows = _in_blocks(shard, self.block_numel), out.view(-1, self.block_bytes)
        block_scales = rows[:, :1].view(_E4M3)
        torch.div(amaxes_of(blocks, 1) / _E2M1_MAX, scale, out=block_scales)
        scaled = blocks / _both(block_scales, scale).neg_()
        codes = torch.bucketize(scaled.view(torch.int32), _tables(shard)[0], out_int32=True)
        torch.add(codes[:, ::2], codes[:, 1::2], alpha=16, out=rows[:, 1:])

    def decode(self, encoded: Tensor, scale: Tensor, out: Tensor) -> None:
        """Multiply each block by both scales in float32 and round once."""
        rows = encoded.view(-1, self.block_bytes)
        pairs = _tables(out)[1].index_select(0, rows[:, 1:].int().view(-1)).view(out.dtype)
        _multiply(pairs.view(-1, self.block_numel), _both(rows[:, :1].view(_E4M3), scale), out)


@dataclass(frozen=True)
class ExtensionFormat(WeightFormat):
    """The codes of a tensor extension (`megatron_fsdp.formats.tensor_extensions`), in whole rows.

    The class itself encodes and wraps them.
    """

    @property
    def stays_encoded(self) -> bool:
        """True if modules compute with the gathered bytes as they are."""
        return True

    @property
    def cuts_rows(self) -> bool:
        """False: the extension encodes whole rows."""
        return False

    @property
    def agrees_on_amax(self) -> bool:
        """False: the extension reduces its scales itself."""
        return False


def _in_blocks(shard: Tensor, block_numel: int) -> Tensor:
    """Return a local shard as blocks (blocks, block), the last padded with zeros."""
    missing = -shard.numel() % block_numel
    return (functional.pad(shard, (0, missing)) if missing else shard).view(-1, block_numel)


def _multiply(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Multiply blocks (n, block) by scales (n, 1) or by one scale, rounding once to the dtype of `out`."""
    if out.numel() == values.numel():
        torch.mul(values, scales, out=out.view(values.shape))
    else:
        out.copy_((values * scales).view(-1)[: out.numel()])


def _both(scales: Tensor, whole: Tensor) -> Tensor:
    """Return the product of each block's e4m3 scale and the tensor's scale."""
    return (scales.float() * whole).clamp_min_(_LEAST_SCALE)


def _powers(codes: Tensor) -> Tensor:
    """Return the powers of two of int32 e8m0 codes from 1 to 254, which are biased exponents."""
    return (codes << 23).view(torch.float32)


def _make_tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Build the lookup tables that encode and decode e2m1.

    The first (15,) holds where, among the bits of negated float32 numbers as int32, the next code begins: in that order
    negative numbers come first, and those of each sign by magnitude. The second (256,) holds by byte what the two codes
    in it stand for, both of `dtype` as one integer.
    """
    ends = torch.tensor(_E2M1_ENDS, device="cpu")
    last_negative = torch.full((1,), -1, dtype=torch.int32, device="cpu")
    values = torch.tensor(_E2M1_VALUES, dtype=dtype, device="cpu")
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    return (
        torch.cat(((-ends).view(torch.int32), last_negative, ends.view(torch.int32))).to(device),
        pairs.view(torch.int32 if dtype.itemsize == 2 else torch.int64).view(-1).to(device),
    )


_keep_tables = cache(_make_tables)


def _tables(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lookup tables for a tensor's device and dtype; cached, since the host waits for their copy."""
    return (_make_tables if isinstance(like, FakeTensor) else _keep_tables)(like.device, like.dtype)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {each.name: each for each in (Fp8(), Fp8Compute(), Mxfp8(), Nvfp4())}
"""The weight formats by name."""
