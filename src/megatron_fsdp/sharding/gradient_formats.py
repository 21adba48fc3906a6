"""Gradient formats: how gradients are rounded to few bits for a slow axis, in blocks that have a scale each.

Sums are encoded row by row, where a row is what one rank receives: each row begins a block, and zeros fill its last.
What rounding loses stays with the sender, who adds it to what it sends next ("error feedback"): so sums over many steps
lose no more than one rounding (F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014; S. P. Karimireddy et al.,
"Error Feedback Fixes SignSGD", 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

_BLOCK = 256
_SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # blocks of zeros divide by it
_CHUNK_NUMEL = 1 << 22  # elements that are rounded at a time
_BORROWED_BYTES = 9  # for each of them: in blocks and divided by the scale, in float32, and its code


def row_numel(numel: int, num_ranks: int) -> int:
    """Return the elements of each row that `numel` elements are cut into, one for each rank; zeros fill the last."""
    return -(-numel // num_ranks)


@dataclass(frozen=True)
class GradientFormat(ABC):
    """What every format is: a rounding of float32 numbers; knows no ranks.

    A block is 256 elements: a float32 scale, the block's largest magnitude / `largest`, then a code for each element,
    which is the nearest one, of ties the even one. A block with NaN or infinity in it is all NaN when it is decoded.
    """

    name: str  # what users call it
    largest: float  # the largest code
    block_bytes: int = _SCALE_BYTES + _BLOCK
    block_numel: int = _BLOCK  # elements that share a scale

    def bytes_of(self, numel: int) -> int:
        """Return the bytes that a row of `numel` elements takes."""
        return -(-numel // self.block_numel) * self.block_bytes

    def borrowed_bytes(self, num_rows: int, numel: int) -> int:
        """Estimate the bytes that are borrowed while rows of `numel` elements are encoded, or decoded and returned."""
        padded = num_rows * -(-numel // self.block_numel) * self.block_numel
        return _BORROWED_BYTES * min(padded, _CHUNK_NUMEL)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Encode float32 rows (rows, n) into `out`, uint8 (rows, bytes_of(n)).

        What rounding lost is left in the place of the rows: 0 in blocks that are not finite.
        """
        for chunk, encoded in self._chunks(values, out):
            blocks = functional.pad(chunk, (0, -chunk.shape[1] % _BLOCK)).view(len(chunk), -1, _BLOCK)
            scales = (blocks.abs().amax(dim=2, keepdim=True) / self.largest).clamp_min_(_LEAST_SCALE)
            encoded[..., :_SCALE_BYTES] = scales.view(torch.uint8)
            # Where the scale is NaN or infinity every code is 0, and 0 times either is NaN.
            encoded[..., _SCALE_BYTES:] = self._to_codes((blocks / scales).nan_to_num_(0.0))
            chunk.sub_(self._decoded(encoded)[:, : chunk.shape[1]]).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Decode uint8 (rows, bytes_of(n)) into float32 (rows, n)."""
        for chunk, part in self._chunks(out, encoded):
            chunk.copy_(self._decoded(part)[:, : chunk.shape[1]])

    def add_up(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        """Decode uint8 (rows, bytes_of(n)) and write the sum of the rows, in their order, into float32 (n,)."""
        for chunk, part in self._chunks(out[None], encoded):
            rows, total = self._decoded(part)[:, : chunk.shape[1]], chunk[0]
            total.copy_(rows[0])
            for row in rows[1:]:
                total.add_(row)

    def _chunks(self, values: torch.Tensor, encoded: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Cut (rows, n) and its bytes into columns: yields (rows, m) and (rows, blocks, block_bytes), views of them."""
        blocks = encoded.view(len(encoded), -1, self.block_bytes)
        step = max(1, _CHUNK_NUMEL // (_BLOCK * len(encoded)))
        for first in range(0, blocks.shape[1], step):
            yield values[:, _BLOCK * first : _BLOCK * (first + step)], blocks[:, first : first + step]

    def _decoded(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode (rows, blocks, block_bytes) into (rows, elements), those that fill the last block included."""
        scales = blocks[..., :_SCALE_BYTES].contiguous().view(torch.float32)
        return self._from_codes(blocks[..., _SCALE_BYTES:]).mul_(scales).flatten(1)

    @abstractmethod
    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        """Round float32 (rows, blocks, 256), which may be overwritten, to the bytes of the codes."""

    @abstractmethod
    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the float32 numbers that bytes stand for."""

    def _rounded(self, scaled: torch.Tensor) -> torch.Tensor:
        """Round to whole numbers, in place; division may have left the largest a little above the largest code."""
        return scaled.round_().clamp_(-self.largest, self.largest)


@dataclass(frozen=True)
class Int8(GradientFormat):
    """Whole numbers from -127 to 127."""

    name: str = "int8"
    largest: float = 127.0

    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return self._rounded(scaled).to(torch.int8).view(torch.uint8)

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float()


@dataclass(frozen=True)
class Fp8(GradientFormat):
    """e4m3."""

    name: str = "fp8"
    largest: float = torch.finfo(torch.float8_e4m3fn).max

    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Int4(GradientFormat):
    """Whole numbers from -7 to 7, two in a byte."""

    name: str = "int4"
    largest: float = 7.0
    block_bytes: int = _SCALE_BYTES + _BLOCK // 2

    def _to_codes(self, scaled: torch.Tensor) -> torch.Tensor:
        codes = self._rounded(scaled).add_(8.0).to(torch.uint8)
        return codes[..., ::2] | codes[..., 1::2] << 4

    def _from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(2).float().sub_(8.0)


GRADIENT_FORMATS: Mapping[str, GradientFormat] = {each.name: each for each in (Int8(), Fp8(), Int4())}
"""The gradient formats by name."""
