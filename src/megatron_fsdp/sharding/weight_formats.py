# ruff: noqa: ARG002 (formats of one protocol, not all of which need every argument)
"""Weight formats: how weights are rounded and packed into bytes before they are gathered.

An encoded buffer is a linear image of the flat buffer: every `block_numel` elements become `block_bytes` bytes (a
block's own scale, if it has one, and codes). So `gather(encode(x))` is `encode(gather(x))` for any cut between blocks.
What more elements than a block share (the largest magnitude of a tensor, a row, a tile) ranks agree on beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

_E4M3_MAX = 448.0
_LEAST_SCALE = 2.0**-126  # the smallest normal float32: all-zero tensors divide by it


class WeightFormat(Protocol):
    """A rounding of weights, as functions of pieces of flattened tensors; knows no ranks.

    A piece is elements ``start`` to ``start + n`` of a flattened tensor of `shape`; `start` is a multiple of the block.
    Blocks go along the flattened tensor; zeros fill the last.

    Attributes:
        name: What users call it.
        block_numel: Elements that are encoded together, which no cut may separate.
        block_bytes: Bytes that a block takes.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def block_numel(self) -> int: ...  # noqa: D102

    @property
    def block_bytes(self) -> int: ...  # noqa: D102

    def amax_numel(self, shape: tuple[int, ...]) -> int:
        """Return how many magnitudes of a tensor ranks have to agree on."""
        ...

    def amaxes(self, piece: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the largest magnitudes in a piece (n,), float32 (amax_numel,): 0 for what is elsewhere, NaN as inf."""
        ...

    def encode(
        self, piece: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Encode a piece (n,) by agreed, finite magnitudes into `out`, uint8 (encoded_bytes(n),)."""
        ...

    def decode(
        self, encoded: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Decode uint8 (encoded_bytes(n),) into `out` (n,), rounding once; all is read before anything is written."""
        ...


def encoded_bytes(weight_format: WeightFormat, numel: int) -> int:
    """Return the bytes that `numel` elements take."""
    return -(-numel // weight_format.block_numel) * weight_format.block_bytes


@dataclass(frozen=True)
class Fp8Tensor:
    """e4m3 with one float32 scale per tensor, largest magnitude / 448."""

    name: str = "fp8"
    block_numel: int = 1
    block_bytes: int = 1

    def amax_numel(self, shape: tuple[int, ...]) -> int:
        """Return 1."""
        return 1

    def amaxes(self, piece: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the largest magnitude (1,)."""
        if not piece.numel():
            return torch.zeros(1, device=piece.device)
        return piece.abs().amax().float().nan_to_num(nan=torch.inf, posinf=torch.inf).view(1)

    def encode(
        self, piece: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Divide by the scale and round to the nearest e4m3."""
        scaled = piece.float().div(_e4m3_scale(amaxes)).clamp_(-_E4M3_MAX, _E4M3_MAX)
        out.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))

    def decode(
        self, encoded: torch.Tensor, start: int, shape: tuple[int, ...], amaxes: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Multiply by the scale in float32 and round once."""
        out.copy_(encoded.view(torch.float8_e4m3fn).float().mul_(_e4m3_scale(amaxes)))


def _e4m3_scale(amaxes: torch.Tensor) -> torch.Tensor:
    return (amaxes / _E4M3_MAX).clamp_min_(_LEAST_SCALE)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {each.name: each for each in (Fp8Tensor(),)}
"""The weight formats by name."""
