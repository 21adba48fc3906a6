"""A parameter group: the parameters of one unit that share dtype, requires_grad and mesh, and their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fsdp.buffer.collectives import Axis
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.gradient_scaling import GradientReduction
from megatron_fsdp.grouping import ParameterGroupSpec
from megatron_fsdp.layout import Layout
from megatron_fsdp.mixed_precision import ResolvedPrecision
from megatron_fsdp.placement import Placement, Placements
from megatron_fsdp.unit.chunks import describe_chunks
from megatron_fsdp.unit.gradients import GradientBuffers
from megatron_fsdp.unit.weights import WeightBuffers


@dataclass(frozen=True)
class GroupPlan:
    """Everything that was decided for one group before any memory was taken.

    Attributes:
        spec: The parameters, by name, and what they share.
        layout: Where they lie.
        precision: The dtype of each buffer.
        reduction: The factor and operation of their gradients.
        placements: Where each buffer lies, by strategy.
        axis: The sharding axis.
        mesh: The one-dimensional mesh that the sharded parameters are described on.
        device: Where the buffers live.
    """

    spec: ParameterGroupSpec
    layout: Layout
    precision: ResolvedPrecision
    reduction: GradientReduction
    placements: Placements
    axis: Axis
    mesh: DeviceMesh
    device: torch.device

    def local_placement(self, placement: Placement) -> Placement:
        """A placement as it matters for memory: on a single rank everything is whole."""
        return Placement.REPLICATE if self.axis.num_ranks == 1 else placement


class ParameterGroup:
    """Buffers and parameter objects of one group.

    Attributes:
        plan: What was decided.
        weights: Compute and main weights.
        gradients: Main gradient and bucket; None for a frozen group.
        sharded: The parameters that optimizer and checkpoint see: DTensors over this rank's pieces of the main weights.
        full: The parameters that compute sees: plain tensors, views of gathered weights.
    """

    def __init__(self, plan: GroupPlan, originals: Sequence[nn.Parameter]) -> None:
        self.plan = plan
        placements = plan.placements
        self.weights = WeightBuffers(
            plan.layout,
            plan.axis,
            (plan.local_placement(placements.compute_weight[-1]), plan.local_placement(placements.main_weight[-1])),
            plan.precision,
            plan.device,
        )
        self.gradients: GradientBuffers | None = None
        if plan.spec.key.requires_grad:
            self.gradients = GradientBuffers(
                plan.layout,
                plan.axis,
                plan.local_placement(placements.main_grad[-1]),
                plan.precision,
                plan.reduction,
                plan.device,
            )
        self._stand_in: torch.Tensor | None = None
        for index, original in enumerate(originals):
            self.weights.store(index, original)
        self.sharded = tuple(self._make_sharded(index, original) for index, original in enumerate(originals))
        self.full = tuple(self._make_full(original) for original in originals)
        if not self.weights_in_slots:
            self.place(self.weights.compute.local)
        self._pointers = tuple(local_of(param).data_ptr() for param in self.sharded)
        self._seen_versions = -1
        self.note_installed()

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical parameter names, in layout order."""
        return tuple(info.name for info in self.plan.spec.parameters)

    @property
    def main_changed(self) -> bool:
        """Whether anyone wrote into the main weights since they were last installed.

        In-place operations count on the DTensor, on its local tensor, or on the memory behind them. Operations through
        `param.data` and torch's private ones on lists of DTensors count nowhere; optimizers are watched instead.
        """
        return self.weights.main_changed or self._versions() != self._seen_versions

    def note_installed(self) -> None:
        """Compute weights agree with main weights now."""
        self.weights.note_seen()
        self._seen_versions = self._versions()

    def _versions(self) -> int:
        return sum(param._version + local_of(param)._version for param in self.sharded)

    def install(self) -> None:
        """Copy main weights into compute weights."""
        self.weights.install()
        self.note_installed()

    def check_parameters(self) -> None:
        """Refuse parameters that were frozen, unfrozen or given hooks after wrapping.

        Raises:
            ConfigurationError: Names the first one.
        """
        wanted = self.gradients is not None
        for index, (name, param) in enumerate(zip(self.names, self.sharded, strict=True)):
            if param.requires_grad is not wanted:
                raise ConfigurationError(
                    f"requires_grad of {name} was {wanted} when the model was sharded and is {param.requires_grad} "
                    "now; buffers for gradients are made once, so set requires_grad before sharding"
                )
            if local_of(param).data_ptr() != self._pointers[index]:
                raise ConfigurationError(
                    f"the data of {name} was replaced after the model was sharded (by param.data = ..., or by moving "
                    "or casting the inner module); copy into the parameter instead, under torch.no_grad()"
                )
            if param._post_accumulate_grad_hooks:
                raise ConfigurationError(
                    f"{name} was given a post-accumulate-grad hook after the model was sharded; autograd never "
                    "reaches the sharded parameter, so it would not run: act on .grad after backward"
                )

    @property
    def is_gathered(self) -> bool:
        """Whether full weights have to be put together from the parts of all ranks."""
        return Placement.SHARD in (self.weights.compute.placement, self.weights.main.placement)

    @property
    def weights_in_slots(self) -> bool:
        """Whether full weights exist only while gathered."""
        return self.weights.compute.placement is Placement.SHARD

    @property
    def grads_sharded(self) -> bool:
        """Whether reduced gradients are this rank's part only."""
        return self.gradients is not None and self.gradients.main.placement is Placement.SHARD

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the full compute weights where they exist only while gathered, else 0."""
        if not self.weights_in_slots:
            return 0
        return self.plan.layout.numel * self.plan.precision.compute.itemsize

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the full gradients on the wire; 0 for a frozen group."""
        return 0 if self.gradients is None else self.plan.layout.numel * self.plan.precision.grad_comm.itemsize

    def change_precision(self, precision: ResolvedPrecision) -> None:
        """Use another communication dtype from now on; the other dtypes must be the same."""
        assert self.gradients is not None
        reduction = self.plan.reduction.for_dtype(precision.grad_comm)
        self.plan = replace(self.plan, precision=precision, reduction=reduction)
        self.gradients.change_precision(precision, reduction)

    def describe_piece(self, index: int, piece: torch.Tensor) -> DTensor:
        """Wrap this rank's piece of tensor `index` as a DTensor of its global shape; no communication, no copy."""
        shape = torch.Size(self.plan.layout.shapes[index])
        sharded = self.plan.placements.main_weight[-1] is Placement.SHARD
        stride = tuple(torch.empty(shape, device="meta").stride())
        return DTensor.from_local(
            piece, self.plan.mesh, [Shard(0) if sharded else Replicate()], run_check=False, shape=shape, stride=stride
        )

    def describe_chunks(self, index: int, tensor: DTensor) -> DTensor:
        """Let torch.distributed.checkpoint know what part of parameter `index` (or of its state) a DTensor holds."""
        if self.plan.placements.main_weight[-1] is Placement.SHARD:
            describe_chunks(tensor, *self.plan.layout.local_range(index, self.plan.axis.rank))
        return tensor

    def shard_like(self, index: int, full: torch.Tensor) -> DTensor:
        """This rank's piece of a full tensor with the shape of parameter `index`, laid out as the parameter; a copy."""
        flat = full.detach().reshape(-1).to(self.plan.device)
        piece = self.weights.main.piece(index)
        if self.weights.main.placement is Placement.SHARD:
            start, stop = self.plan.layout.local_range(index, self.plan.axis.rank)
            flat = flat[start:stop]
        return self.describe_piece(index, flat.clone().view(piece.shape))

    def place(self, full: torch.Tensor) -> None:
        """Point the full parameters into memory that holds (or will hold) the gathered weights, (numel,)."""
        with torch.inference_mode(False):
            for index, param in enumerate(self.full):
                param.data = self.weights.full_view(full, index)

    def hide(self) -> None:
        """Point the full parameters nowhere, with their shapes: reading them must not touch memory that is gone."""
        with torch.inference_mode(False):
            if self._stand_in is None:
                self._stand_in = self._one_element()
            for param in self.full:
                param.data = self._stand_in.expand(param.shape)

    def _one_element(self) -> torch.Tensor:
        """What a parameter without memory points to; expanded, it has the right shape."""
        return torch.zeros((), dtype=self.plan.precision.compute, device=self.plan.device)

    def _make_sharded(self, index: int, original: nn.Parameter) -> nn.Parameter:
        piece = self.describe_piece(index, self.weights.main.piece(index))
        param = nn.Parameter(piece, requires_grad=original.requires_grad)
        param.__dict__.update(original.__dict__)
        return param

    def _make_full(self, original: nn.Parameter) -> nn.Parameter:
        param = nn.Parameter(self._one_element().expand(original.shape), requires_grad=original.requires_grad)
        param.__dict__.update(original.__dict__)
        for hook in (original._backward_hooks or {}).values():
            param.register_hook(hook)  # called with this rank's gradient before it is reduced, as under DDP
        return param


def local_of(param: nn.Parameter) -> torch.Tensor:
    """The local tensor of a sharded parameter itself, not a view of it as `to_local` returns."""
    assert isinstance(param, DTensor)
    return param._local_tensor
