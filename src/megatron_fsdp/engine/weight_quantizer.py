"""Compute weights in a weight format: the bytes of a group's flat buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from megatron_fsdp.engine.memory import FlatBuffer
from megatron_fsdp.sharding.placement import Layout, Region
from megatron_fsdp.sharding.weight_formats import WeightFormat, encoded_bytes

_CHUNK_NUMEL = 1 << 22  # elements that are decoded at a time, through float32; a multiple of every block


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
        """Decode the bytes of a region into `out` (region.numel,), whose last bytes `encoded` may be."""
        scales = self.format.scales(self.amaxes)
        # A chunk's bytes lie at or behind its place in `out`, since no element takes more bytes encoded, and chunks
        # come in the order of their places: so none is overwritten before it is read.
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
