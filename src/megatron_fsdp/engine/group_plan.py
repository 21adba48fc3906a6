"""What is decided for one parameter group before any memory is taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from megatron_fsdp.comm.axis import Axis
from megatron_fsdp.config.homes import ON_DEVICE, Home, Homes
from megatron_fsdp.config.precision import ResolvedPrecision
from megatron_fsdp.dtensor.frame import ShardFrame
from megatron_fsdp.engine.domain import FlatAxis
from megatron_fsdp.engine.parts import TensorParallelPart
from megatron_fsdp.sharding.gradient_formats import GRADIENT_FORMATS, GradientFormat, row_numel
from megatron_fsdp.sharding.gradient_scaling import GradientReduction
from megatron_fsdp.sharding.layout import Layout
from megatron_fsdp.sharding.placement import Placement, Placements, Region, held_region, shard_count
from megatron_fsdp.sharding.shards import MeshUse, ShardDescription, TensorParallelCut
from megatron_fsdp.sharding.units import (
    ParameterGroupSpec,
)
from megatron_fsdp.sharding.weight_formats import Fp8Compute, WeightFormat, encoded_bytes


@dataclass(frozen=True)
class GroupPlan:
    """Everything that was decided for one group before memory is allocated.

    Attributes:
        spec: The parameters, by name, and what they share.
        layout: Their places in the flat buffer.
        precision: The dtype of each buffer.
        reduction: The factor and operation of their gradients.
        placements: The placement of each buffer, by strategy.
        axes: The data-parallel axes, outermost first; the last one is the sharding axis.
        mesh: The mesh of the sharded parameters' DTensors: the axes, and the tensor-parallel one last where there is
            one.
        device: Device of the buffers.
        parts: For each parameter how tensor parallelism cut it before; None where it did not.
        layouts_by_part: The layout on each tensor-parallel rank, where their parts differ in shape; else empty.
        foreign_groups: For experts, groups of ranks that hold other experts.
        flat: Both axes of a hybrid mesh as one, where gradients are added rank by rank; else None.
        homes: Where its state rests; fractions count no more.
    """

    spec: ParameterGroupSpec
    layout: Layout
    precision: ResolvedPrecision
    reduction: GradientReduction
    placements: Placements
    axes: tuple[Axis, ...]
    mesh: DeviceMesh
    device: torch.device
    parts: tuple[TensorParallelPart | None, ...]
    layouts_by_part: tuple[Layout, ...] = ()
    foreign_groups: tuple[dist.ProcessGroup, ...] = ()
    flat: FlatAxis | None = None
    homes: Homes = Homes()  # noqa: RUF009 (frozen)

    @property
    def compute_home(self) -> Home:
        """Where compute weights rest; on the device where they are whole."""
        return self.homes.compute_weights if Placement.SHARD in self.placements.compute_weight else ON_DEVICE

    @property
    def main_home(self) -> Home:
        """Where main weights rest; those of a frozen group are its compute weights."""
        return self.homes.main_weights if self.requires_grad else self.compute_home

    @property
    def has_main_copy(self) -> bool:
        """Whether main weights have memory of their own, since their dtype or their home is another."""
        return self.precision.has_main_copy or self.main_home != self.compute_home

    @property
    def axis(self) -> Axis:
        """The sharding axis."""
        return self.axes[-1]

    @property
    def num_shards(self) -> int:
        """Number of parts that main weights are cut into."""
        return shard_count(self.placements.main_weight, self.axes)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameters are trained."""
        return self.spec.key.requires_grad

    @property
    def is_expert(self) -> bool:
        """Whether these are parameters of experts, on the mesh of these."""
        return self.spec.key.is_expert

    @property
    def is_trained_whole(self) -> bool:
        """Whether every rank updates the whole main weights, under whatever strategy."""
        return self.requires_grad and Placement.SHARD not in self.placements.main_weight

    @cached_property
    def inner_region(self) -> Region:
        """The elements of the compute weights that one inner rank has after the gather over the outer ranks."""
        inner_only = [Placement.REPLICATE] * (len(self.axes) - 1) + [self.placements.main_weight[-1]]
        return held_region(self.layout.numel, inner_only, self.axes)

    @cached_property
    def main_region(self) -> Region:
        """The elements of the main weights that are on this rank."""
        return held_region(self.layout.numel, self.placements.main_weight, self.axes)

    @cached_property
    def needs_all_gather(self) -> bool:
        """Whether full weights are all-gathered from the inner ranks."""
        return self.inner_region.numel < self.layout.numel

    @cached_property
    def gathers_outer(self) -> bool:
        """Whether an inner rank's part is all-gathered from the outer ranks, after an update."""
        return self.main_region.numel < self.inner_region.numel

    @cached_property
    def shards_compute_weights(self) -> bool:
        """Whether full weights exist only while gathered: shards are cut, or rest elsewhere."""
        held = held_region(self.layout.numel, self.placements.compute_weight, self.axes)
        return self.compute_home.is_away or held.numel < self.layout.numel

    @property
    def is_looked_up(self) -> bool:
        """Whether backward reads none of the weights."""
        return all(info.is_looked_up for info in self.spec.parameters)

    @property
    def gathered_bytes(self) -> int:
        """Bytes that the full compute weights take while they are gathered, and only then, else 0."""
        return self.gathered_numel * self.gathered_dtype.itemsize if self.shards_compute_weights else 0

    @property
    def gathered_dtype(self) -> torch.dtype:
        """The dtype of the memory of full compute weights."""
        return torch.uint8 if self.stays_encoded else self.precision.compute

    @property
    def gathered_numel(self) -> int:
        """Elements of `gathered_dtype` in the full compute weights."""
        return self.sent_bytes if self.stays_encoded else self.layout.numel

    @property
    def weight_format(self) -> WeightFormat | None:
        """The weight format of the compute weights; None: their dtype."""
        return self.spec.key.weight_format

    @property
    def stays_encoded(self) -> bool:
        """Whether modules compute with the bytes that are gathered."""
        return self.weight_format is not None and self.weight_format.stays_encoded

    @property
    def scale_bytes(self) -> int:
        """Bytes of the magnitudes that ranks agree on for the weight format, and of scales that linears multiply by."""
        form = self.weight_format
        numel = 0 if form is None else sum(form.amax_numel(shape) for shape in self.layout.shapes)
        return numel * torch.float32.itemsize * (2 if isinstance(form, Fp8Compute) else 1)

    @property
    def keeps_transposed(self) -> bool:
        """Whether gathered weights are kept transposed, too, once a backward has multiplied them."""
        return isinstance(self.weight_format, Fp8Compute) and self.weight_format.keeps_transposed

    @property
    def is_encoded(self) -> bool:
        """Whether compute weights are held and gathered as the bytes of a weight format."""
        return self.weight_format is not None and (self.shards_compute_weights or self.stays_encoded)

    @property
    def sent_dtype(self) -> torch.dtype:
        """The dtype of the memory that gathers read."""
        return torch.uint8 if self.is_encoded else self.precision.compute

    @property
    def sent_bytes(self) -> int:
        """Bytes of the full compute weights as they travel."""
        return self._bytes_sent(self.layout.numel)

    @property
    def held_bytes(self) -> int:
        """Bytes of the compute weights on this rank while they are not gathered."""
        return self._bytes_sent(held_region(self.layout.numel, self.placements.compute_weight, self.axes).numel)

    @property
    def shard_bytes(self) -> int:
        """Bytes of the compute weights on this rank, where gathers read or write them, else 0."""
        if not (self.needs_all_gather or self.gathers_outer) or self.compute_home.is_away:
            return 0
        return self.held_bytes

    def _bytes_sent(self, numel: int) -> int:
        if self.is_encoded and self.weight_format is not None:
            return encoded_bytes(self.weight_format, numel)
        return numel * self.precision.compute.itemsize

    @property
    def _crosses(self) -> bool:
        """Whether gradients are sent over the outer axis."""
        return self.requires_grad and len(self.axes) > 1 and self.axes[0].num_ranks > 1

    @property
    def outer_format(self) -> GradientFormat | None:
        """The gradient format in which they are; None: they keep their dtype, or are not sent."""
        name = self.precision.outer_format
        return None if name is None or not self._crosses else GRADIENT_FORMATS[name]

    @property
    def crossing_dtype(self) -> torch.dtype:
        """The dtype of the memory that they are sent from."""
        return self.precision.grad_comm if self.outer_format is None else torch.uint8

    @property
    def crossing_bytes(self) -> int:
        """Bytes of the gradients that are sent over the outer axis; 0 where nothing is."""
        if not self._crosses:
            return 0
        if self.outer_format is None:
            return self.inner_region.numel * self.precision.grad_comm.itemsize
        ranks = self.axes[0].num_ranks
        return ranks * self.outer_format.bytes_of(row_numel(self.inner_region.numel, ranks))

    @property
    def outer_error_bytes(self) -> int:
        """Bytes of what rounding to a gradient format has lost, which is kept."""
        if self.outer_format is None:
            return 0
        ranks = self.axes[0].num_ranks
        rows = ranks if self.gathers_outer else ranks + 1  # those that are sent, and what this rank has added up
        return rows * row_numel(self.inner_region.numel, ranks) * torch.float32.itemsize

    @property
    def received_bytes(self) -> int:
        """Bytes that an exchange over the outer axis receives, else 0."""
        exchanges = self.outer_format is not None or (self.gathers_outer and self.axes[0].exchanges_pairwise)
        return self.crossing_bytes if exchanges else 0

    @property
    def exchanges_inner(self) -> bool:
        """Whether gradients are reduced over the inner ranks by an exchange, which needs scratch."""
        return self.requires_grad and self.needs_all_gather and self.axis.exchanges_pairwise

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the full gradients in the communication dtype; 0 for a frozen group."""
        return self.layout.numel * self.precision.grad_comm.itemsize if self.requires_grad else 0

    def frame(self, index: int) -> ShardFrame:
        """Describe which elements of tensor `index` every rank holds, for its main weight, gradient and state."""
        part, layouts = self.parts[index], self.layouts_by_part
        is_sharded = [placement is Placement.SHARD for placement in self.placements.main_weight]
        use = MeshUse(
            sizes=tuple(self.mesh.mesh.shape),
            shard_dims=tuple(dim for dim in reversed(range(len(is_sharded))) if is_sharded[dim]),
            tensor_dim=len(self.axes) if self.mesh.ndim > len(self.axes) else None,
        )
        on_mesh = self.mesh.get_coordinate()
        assert on_mesh is not None
        coordinate = (*(axis.rank for axis in self.axes), *on_mesh[len(self.axes) :])
        tensor_cut = None
        if part is not None and isinstance(part.placement, Shard):
            dim = part.placement.dim
            tensor_cut = TensorParallelCut.by_chunk(part.shape[dim], use.num_parts, dim)
        return ShardFrame(
            self.mesh,
            ShardDescription(
                shape=self.layout.shapes[index] if part is None else tuple(part.shape),
                use=use,
                coordinate=coordinate,
                cut=self.layout.cut(index),
                tensor_cut=tensor_cut,
                other_cuts=tuple(layout.cut(index) for layout in layouts),
            ),
            self.foreign_groups,
            self.reduction.adds_up,
        )
