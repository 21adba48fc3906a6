# ruff: noqa: ARG002 (not all formats need every argument)
"""Weight formats: how weights are rounded and packed into bytes before they are gathered.

An encoded buffer is a linear image of the flat buffer: every `block_numel` elements become `block_bytes` bytes (a
block's own scale, if it has one, and codes). So `gather(encode(x))` is `encode(gather(x))` for any cut between blocks.
What more elements than a block share (the largest magnitude of a tensor, a row, a tile) ranks agree on beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch.nn import functional

_TILE = 128
_E4M3_MAX = 448.0
_E8M0_BIAS = 127
_E2M1_MAX = 6.0
_E2M1_SIGN = 8
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BELOW = 1 - 2.0**-24  # times a power of two or a short fraction: the next smaller float32
_E2M1_ENDS = (0.25, 0.75 * _BELOW, 1.25, 1.75 * _BELOW, 2.5, 3.5 * _BELOW, 5.0)
"""The largest float32 that rounds to each of the seven smallest magnitudes: a tie goes to the even code."""
_LEAST_SCALE = 2.0**-126  # the smallest normal float32: all-zero tensors divide by it


def encoded_bytes(weight_format: WeightFormat, numel: int) -> int:
    """Return the bytes that `numel` elements take."""
    return -(-numel // weight_format.block_numel) * weight_format.block_bytes


def scale_to(largest: float, amaxes: torch.Tensor) -> torch.Tensor:
    """Return what codes up to `largest` are multiplied by to be values up to `amaxes` again, float32."""
    return (amaxes / largest).clamp_min_(_LEAST_SCALE)


@dataclass(frozen=True)
class WeightFormat:
    """What every format is: a rounding of weights, as functions of pieces of flattened tensors; knows no ranks.

    A piece is elements ``start`` to ``start + n`` of a flattened tensor of `shape`; `start` is a multiple of the block.
    Blocks go along the flattened tensor; zeros fill the last.

    Attributes:
        name: What users call it.
        block_numel: Elements that are encoded together, which no cut may separate.
        block_bytes: Bytes that a block takes.
    """

    name: str
    block_numel: int = 1
    block_bytes: int = 1

    @property
    def stays_encoded(self) -> bool:
        """Whether modules compute with the bytes as they are gathered."""
        return False

    @property
    def cuts_rows(self) -> bool:
        """Whether a cut between blocks may lie inside of a row."""
        return True

    def amax_numel(self, shape: tuple[int, ...]) -> int:
        """Return how many magnitudes of a tensor ranks have to agree on: one, that of the tensor."""
        return 1

    def amaxes(self, piece: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the largest magnitudes in a piece (n,), float32 (amax_numel,): 0 for what is elsewhere, NaN as inf."""
        found = torch.zeros(self.amax_numel(shape), device=piece.device)
        magnitudes = piece.float().abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        places = self._places(start, piece.numel(), shape, piece.device)
        if places is not None:
            return found.scatter_reduce_(0, places, magnitudes, "amax")
        return magnitudes.amax().view(1) if piece.numel() else found

    def _places(self, start: int, numel: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        """Return which of the magnitudes each element of a piece has (numel,); None: the only one."""
        return None

    def encode(
        self, piece: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Encode a piece (n,) by agreed, finite magnitudes into `out`, uint8 (encoded_bytes(n),), to the nearest."""
        raise NotImplementedError

    def decode(
        self, encoded: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Decode uint8 (encoded_bytes(n),) into `out` (n,), rounding once; all is read before anything is written."""
        raise NotImplementedError


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """e4m3 with one float32 scale per tensor, its largest magnitude / 448."""

    name: str = "fp8"

    def encode(
        self, piece: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Divide each element by its scale and round to the nearest e4m3."""
        scales = self._scales(start, piece.numel(), shape, amaxes)
        out.copy_(_to_e4m3(piece.float().div(scales)).view(torch.uint8))

    def decode(
        self, encoded: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Multiply each element by its scale in float32 and round once."""
        out.copy_(_from_e4m3(encoded).mul_(self._scales(start, out.numel(), shape, amaxes)))

    def _scales(self, start: int, numel: int, shape: tuple[int, ...], amaxes: torch.Tensor) -> torch.Tensor:
        scales = scale_to(_E4M3_MAX, amaxes)
        places = self._places(start, numel, shape, amaxes.device)
        return scales if places is None else scales[places]


@dataclass(frozen=True)
class Fp8Compute(Fp8):
    """The bytes of "fp8", which linears multiply as they are gathered (`megatron_fsdp.engine.fp8_linear`).

    Attributes:
        keeps_transposed: Whether the transposed codes that backward multiplies are kept while weights are gathered.
    """

    name: str = "fp8_compute"
    keeps_transposed: bool = False

    @property
    def stays_encoded(self) -> bool:
        """Whether modules compute with the bytes as they are gathered."""
        return True


@dataclass(frozen=True)
class Fp8Row(Fp8):
    """e4m3 with one float32 scale per row, that is, per index of the first dimension."""

    name: str = "fp8_row"

    def amax_numel(self, shape: tuple[int, ...]) -> int:
        """Return the number of rows."""
        return shape[0]

    def _places(self, start: int, numel: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        return torch.arange(start, start + numel, device=device) // max(1, prod(shape[1:]))


@dataclass(frozen=True)
class Fp8RowCompute(Fp8Row, Fp8Compute):
    """The bytes of "fp8_row", which linears multiply as they are gathered."""

    name: str = "fp8_row_compute"


@dataclass(frozen=True)
class Fp8Tile(Fp8):
    """e4m3 with one float32 scale per tile of 128 x 128 (DeepSeek-V3); columns are all dimensions but the first."""

    name: str = "fp8_tile"

    def amax_numel(self, shape: tuple[int, ...]) -> int:
        """Return the number of tiles, those at the edges included."""
        return -(-shape[0] // _TILE) * -(-prod(shape[1:]) // _TILE)

    def _places(self, start: int, numel: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        columns = max(1, prod(shape[1:]))
        element = torch.arange(start, start + numel, device=device)
        return element // columns // _TILE * -(-columns // _TILE) + element % columns // _TILE


@dataclass(frozen=True)
class Mxfp8(WeightFormat):
    """e4m3 in blocks of 32 with a power of two as scale (e8m0), the least that keeps the block within 448.

    Ranks agree on a magnitude per tensor only to find NaN and infinity.
    """

    name: str = "mxfp8"
    block_numel: int = 32
    block_bytes: int = 33

    def encode(
        self, piece: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Divide each block by its scale and round to the nearest e4m3."""
        blocks = _in_blocks(piece, self.block_numel)
        fraction, exponents = torch.frexp(blocks.abs().amax(dim=1, keepdim=True) / _E4M3_MAX)
        exponents = (exponents - (fraction == 0.5).int()).clamp_(-_E8M0_BIAS + 1, _E8M0_BIAS)  # the log2, rounded up
        rows = out.view(-1, self.block_bytes)
        rows[:, :1] = (exponents + _E8M0_BIAS).to(torch.uint8)
        rows[:, 1:] = _to_e4m3(torch.ldexp(blocks, -exponents)).view(torch.uint8)

    def decode(
        self, encoded: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Multiply each block by its scale in float32 and round once."""
        rows = encoded.view(-1, self.block_bytes)
        exponents = rows[:, :1].int() - _E8M0_BIAS
        out.copy_(torch.ldexp(_from_e4m3(rows[:, 1:]), exponents).view(-1)[: out.numel()])


@dataclass(frozen=True)
class Nvfp4(WeightFormat):
    """e2m1, two in a byte, in blocks of 16 with an e4m3 scale each, and one float32 scale per tensor.

    The scale of the tensor is its largest magnitude / (6 * 448); that of a block makes its largest element 6.
    """

    name: str = "nvfp4"
    block_numel: int = 16
    block_bytes: int = 9

    def encode(
        self, piece: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Divide each block by both scales and round to the nearest e2m1, ties to even."""
        blocks = _in_blocks(piece, self.block_numel)
        whole = self._tensor_scale(amaxes)
        scales = _to_e4m3(blocks.abs().amax(dim=1, keepdim=True) / _E2M1_MAX / whole)
        divisors = (scales.float() * whole).clamp_min_(_LEAST_SCALE)
        scaled = blocks / divisors
        codes = torch.bucketize(scaled.abs(), torch.tensor(_E2M1_ENDS, device=piece.device)).to(torch.uint8)
        codes += scaled.signbit().to(torch.uint8) * _E2M1_SIGN
        rows = out.view(-1, self.block_bytes)
        rows[:, :1] = scales.view(torch.uint8)
        rows[:, 1:] = codes[:, ::2] | codes[:, 1::2] << 4

    def decode(
        self, encoded: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Multiply each block by both scales in float32 and round once."""
        rows = encoded.view(-1, self.block_bytes)
        values = torch.tensor(_E2M1_VALUES, device=encoded.device)
        codes = torch.stack((rows[:, 1:] & 15, rows[:, 1:] >> 4), dim=2).view(-1, self.block_numel)
        divisors = (_from_e4m3(rows[:, :1]) * self._tensor_scale(amaxes)).clamp_min_(_LEAST_SCALE)
        out.copy_((values[codes.int()] * divisors).view(-1)[: out.numel()])

    def _tensor_scale(self, amaxes: torch.Tensor) -> torch.Tensor:
        return scale_to(_E2M1_MAX * _E4M3_MAX, amaxes)


@dataclass(frozen=True)
class GuestFormat(WeightFormat):
    """The codes of a tensor class that is gathered in its own way (`megatron_fsdp.engine.guests`), in whole rows.

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

    def amax_numel(self, shape: tuple[int, ...]) -> int:
        """Return 0: the class agrees on its scales itself."""
        return 0


def _in_blocks(piece: torch.Tensor, block_numel: int) -> torch.Tensor:
    """Return a piece as float32 blocks, the last filled with zeros."""
    return functional.pad(piece.float(), (0, -piece.numel() % block_numel)).view(-1, block_numel)


def _to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e4m3, ties to even; what is beyond the largest becomes the largest."""
    return values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).float()


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    each.name: each for each in (Fp8(), Fp8Compute(), Fp8Row(), Fp8RowCompute(), Fp8Tile(), Mxfp8(), Nvfp4())
}
"""The weight formats by name."""
