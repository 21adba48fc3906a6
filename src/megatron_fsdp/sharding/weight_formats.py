"""Weight formats: how weights are rounded and packed into bytes before they are gathered.

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
    """Return the bytes that `numel` elements take."""
    return -(-numel // weight_format.block_numel) * weight_format.block_bytes


def scale_to(largest: float, amaxes: Tensor) -> Tensor:
    """Return what codes up to `largest` are multiplied by to be values up to `amaxes` again, float32."""
    return (amaxes / largest).clamp_min_(_LEAST_SCALE)


def amaxes_of(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the amax, or those along a dimension, which stays; float32, NaN where there is one.

    Values are read once and not copied, which `values.abs().amax()` does.
    """
    low, high = torch.aminmax(values) if dim is None else torch.aminmax(values, dim=dim, keepdim=True)
    return torch.maximum(low.abs(), high.abs()).float()


@dataclass(frozen=True)
class WeightFormat:
    """What every format is: a rounding of weights, as functions of pieces of flattened tensors; knows no ranks.

    A piece is a run of elements of a flattened tensor that begins at a block. Blocks go along the flattened tensor;
    zeros fill the last.
    """

    name: str  # what users call it
    block_numel: int = 1  # elements that are encoded together, which no cut may separate
    block_bytes: int = 1
    largest: float = _E4M3_MAX  # what the amax of a tensor is encoded as

    @property
    def stays_encoded(self) -> bool:
        """Whether modules compute with the bytes as they are gathered."""
        return False

    @property
    def cuts_rows(self) -> bool:
        """Whether a cut between blocks may lie inside of a row."""
        return True

    @property
    def agrees_on_amax(self) -> bool:
        """Whether ranks agree on the amax of each tensor."""
        return True

    def amax(self, piece: Tensor) -> Tensor:
        """Return the amax in a piece (n,), float32 (1,): 0 where nothing is here, infinity for NaN."""
        if not piece.numel():
            return torch.zeros(1, device=piece.device)
        return amaxes_of(piece).view(1).nan_to_num_(inf, inf)

    def scales(self, amaxes: Tensor) -> Tensor:
        """Return the scales of amaxes that ranks agreed on."""
        return scale_to(self.largest, amaxes)

    def encode(self, piece: Tensor, scale: Tensor, out: Tensor) -> None:
        """Encode a piece (n,), float32 or narrower, to the nearest into `out`, uint8 (encoded_bytes(n),).

        `scale`, (1,), is that of an agreed, finite amax.
        """
        raise NotImplementedError

    def decode(self, encoded: Tensor, scale: Tensor, out: Tensor) -> None:
        """Decode uint8 (encoded_bytes(n),) into `out` (n,), rounding once; all is read before anything is written."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """e4m3 with one float32 scale per tensor, its amax / 448."""

    name: str = "fp8"

    def encode(self, piece: Tensor, scale: Tensor, out: Tensor) -> None:
        """Divide each element by the scale and round to the nearest e4m3."""
        # Rounding alone leaves a quotient beyond 448, far from 464, from where on conversion would return NaN.
        torch.div(piece, scale, out=out.view(_E4M3))

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
        """Whether modules compute with the bytes as they are gathered."""
        return True


@dataclass(frozen=True)
class Mxfp8(WeightFormat):
    """e4m3 in blocks of 32 with a power of two as scale (e8m0), the least that keeps the block within 448.

    Ranks agree on an amax per tensor only to find NaN and infinity.
    """

    name: str = "mxfp8"
    block_numel: int = 32
    block_bytes: int = 33

    def encode(self, piece: Tensor, scale: Tensor, out: Tensor) -> None:  # noqa: ARG002
        """Divide each block by its scale and round to the nearest e4m3."""
        blocks, rows = _in_blocks(piece, self.block_numel), out.view(-1, self.block_bytes)
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

    def encode(self, piece: Tensor, scale: Tensor, out: Tensor) -> None:
        """Divide each block by both scales and round to the nearest e2m1, ties to even."""
        blocks, rows = _in_blocks(piece, self.block_numel), out.view(-1, self.block_bytes)
        block_scales = rows[:, :1].view(_E4M3)
        torch.div(amaxes_of(blocks, 1) / _E2M1_MAX, scale, out=block_scales)
        scaled = blocks / _both(block_scales, scale).neg_()
        codes = torch.bucketize(scaled.view(torch.int32), _tables(piece)[0], out_int32=True)
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
        """Whether modules compute with the bytes as they are gathered."""
        return True

    @property
    def cuts_rows(self) -> bool:
        """Whether a cut between blocks may lie inside of a row: the class encodes whole ones."""
        return False

    @property
    def agrees_on_amax(self) -> bool:
        """Whether ranks agree on the amax of each tensor: the class agrees on its scales itself."""
        return False


def _in_blocks(piece: Tensor, block_numel: int) -> Tensor:
    """Return a piece as blocks, the last filled with zeros."""
    missing = -piece.numel() % block_numel
    return (functional.pad(piece, (0, missing)) if missing else piece).view(-1, block_numel)


def _multiply(values: Tensor, scales: Tensor, out: Tensor) -> None:
    """Multiply blocks of values of the dtype of `out`, (n, block), by scales (n, 1), or all by one, rounding once."""
    if out.numel() == values.numel():
        torch.mul(values, scales, out=out.view(values.shape))
    else:
        out.copy_((values * scales).view(-1)[: out.numel()])


def _both(scales: Tensor, whole: Tensor) -> Tensor:
    """Return the product of the e4m3 scales of blocks and that of their tensor."""
    return (scales.float() * whole).clamp_min_(_LEAST_SCALE)


def _powers(codes: Tensor) -> Tensor:
    """Return the powers of two that int32 e8m0 codes from 1 to 254 stand for, whose exponents they are."""
    return (codes << 23).view(torch.float32)


def _make_tables(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make the tables to which e2m1 is written and read.

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
    """Return the tables for a tensor's device and dtype; the host waits for the copy, so they are copied once."""
    return (_make_tables if isinstance(like, FakeTensor) else _keep_tables)(like.device, like.dtype)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {each.name: each for each in (Fp8(), Fp8Compute(), Mxfp8(), Nvfp4())}
"""The weight formats by name."""
