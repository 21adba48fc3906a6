"""A parameter group: the parameters of one unit that share a `GroupKey`, and their buffers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.comm.collectives import address_of, addresses_of, has_values
from megatron_fsdp.dtensor.reduction import unite_gradients
from megatron_fsdp.dtensor.shard_spec import ShardSpec, describe_chunks, local_tensor
from megatron_fsdp.dtensor.tensor import DATA, UnevenDTensor, as_sharded, register_with_torch, swap_tensors
from megatron_fsdp.engine.gradients import (
    DECOUPLED,
    GRAD,
    GradAttribute,
    GradientBuffers,
    get_grad,
    get_grads,
    plain_attributes,
)
from megatron_fsdp.engine.memory import FlatBuffer, allocate, full_view, on_device, shard_view
from megatron_fsdp.engine.plans import GroupPlan, Sharding
from megatron_fsdp.engine.weight_quantizer import EncodedBuffer, WeightQuantizer, WrappingQuantizer
from megatron_fsdp.errors import ConfigurationError, NonFiniteWeightError
from megatron_fsdp.sharding.mesh import RankMesh
from megatron_fsdp.sharding.placement import Region, held_region

REPLACED = "_fsdp_replaced"
"""Attribute of a parameter that sharding has taken out of a module, and that gets no gradient any more: its name."""

# The two weight buffers of a parameter group: what compute uses and what the optimizer updates.
#
#     main weight  -> copied, cast ->  its shard of the compute weight  -> all-gathered over the outer axis ->
#     an inner rank's shard  -> all-gathered over the inner axis ->  full compute weight
#
# A gather that would not grow the region is left out.


class WeightBuffers:
    """Compute weights and main weights, in the same memory where dtype and placement allow it."""

    def __init__(self, plan: GroupPlan, quantizer: WeightQuantizer | None) -> None:
        """Allocate both buffers."""
        self._axes = plan.axes
        self._dtype = plan.precision.compute
        self._device = plan.device
        self.quantizer = quantizer
        self.is_encoded = plan.is_encoded
        self.is_offloaded = plan.offloads_compute
        # With a weight format main weights always have memory of their own, since encoding rounds.
        self.main_lies_in_compute = self.quantizer is None and not plan.has_main_copy
        self._is_stale = False  # the compute weights are not encoded from what was stored last
        self.seen_version = -1  # of the main weights, as they were last installed
        if not self.main_lies_in_compute:
            self.main = _main_buffer(plan)
        numel = plan.held_bytes // plan.sent_dtype.itemsize
        self._use(plan, allocate(plan.offloads_compute, numel, plan.sent_dtype, plan.device))

    def _use(self, plan: GroupPlan, memory: torch.Tensor) -> None:
        """Make the compute weights of memory, and the main weights that lie in it."""
        layout = plan.layout
        # In the compute dtype, or the bytes of a weight format where they are gathered into slots. Sharded under
        # strategy 3, else full (and, under 1 and 2, up to date only in this rank's shard between an optimizer step and
        # the next gather). Main weights are full under strategy 0, else this rank's shard.
        held = held_region(layout.numel, plan.placements.compute_weight, plan.axes)
        self.compute = FlatBuffer(layout, held, memory)
        if self.quantizer is not None and plan.is_encoded:
            self.compute = EncodedBuffer(self.quantizer, layout, held, memory)
        if self.main_lies_in_compute:
            self.main = self.compute
            if plan.main_region != self.compute.region:
                self.main = FlatBuffer(layout, plan.main_region, self.compute.view_of(plan.main_region))
        self._sent = self.compute.view_of(plan.inner_region)

    def move_into(self, plan: GroupPlan, memory: torch.Tensor) -> None:
        """Move the compute weights into other memory of their length and dtype."""
        memory.copy_(self.compute.local)
        self._use(plan, memory)

    def store(self, index: int, tensor: torch.Tensor) -> None:
        """Copy the initial value of tensor `index`, full and in any dtype, into both buffers."""
        for buffer in self._stored:
            buffer.store(index, tensor)

    def store_all(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy the initial values of all tensors but those that are None, in few calls."""
        for buffer in self._stored:
            buffer.store_all(tensors)

    @property
    def _stored(self) -> tuple[FlatBuffer, ...]:
        """The buffers that take initial values; encoding waits until ranks agree on amaxes."""
        if self.quantizer is not None:
            self._is_stale = True
            return (self.main,)
        return (self.compute,) if self.main_lies_in_compute else (self.compute, self.main)

    @property
    def main_changed(self) -> bool:
        """True if the memory of the main weights was written to since they were installed.

        Where weights are gathered in place, around the main weights, this cannot tell, and says no.
        """
        if self._is_stale:
            return True
        # Their memory is written by all-gathers, too, so its version counter says nothing about main weights.
        gathered_in_place = self.main_lies_in_compute and self.main is not self.compute
        return not gathered_in_place and self.main.local._version != self.seen_version

    def install(self) -> None:
        """Copy main weights into compute weights, with the cast or by the agreed amaxes; no communication."""
        self._is_stale = False
        if self.quantizer is not None:
            write = self.quantizer.encode if self.is_encoded else self.quantizer.round_into
            out = self.compute.view_of(self.main.region)
            # Offloaded bytes are encoded on the device, and copied out. See Note [Offloaded state] in `memory.py`.
            made = torch.empty_like(out, device=self._device) if self.is_offloaded else out
            write(on_device(self.main.local.detach(), self._device), self.main.region, made)
            if made is not out:
                out.copy_(made)
        elif not self.main_lies_in_compute:
            self.compute.view_of(self.main.region).copy_(self.main.local)

    def all_gather_outer(self, async_op: bool) -> torch.distributed.Work | None:
        """All-gather an inner rank's shard of the compute weights, in place, over the outer ranks."""
        return self._axes[0].all_gather(self._sent, self.compute.view_of(self.main.region), async_op)

    def all_gather_into(self, full: torch.Tensor, async_op: bool) -> torch.distributed.Work | None:
        """All-gather compute weights into `full` (numel,), over the inner ranks; bytes go to its end."""
        return self._axes[-1].all_gather(self._arrives(full), self._own_shard(full), async_op)

    def fetch(self, full: torch.Tensor, _async_op: bool) -> None:
        """Copy the offloaded shard to its place in `full`, from which it is all-gathered."""
        self._own_shard(full).copy_(self._sent, non_blocking=True)

    def _arrives(self, full: torch.Tensor) -> torch.Tensor:
        """Return the memory that an all-gather fills: `full`, or its end for bytes that are decoded in place."""
        if self.quantizer is None or not self.is_encoded:
            return full
        return full.view(torch.uint8)[-self.quantizer.bytes_of(self.compute.layout.numel) :]

    def _own_shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's input of the all-gather: the shard, or the copy of an offloaded one in `full`."""
        if not self.is_offloaded:
            return self._sent
        return self._arrives(full).narrow(0, self._axes[-1].rank * self._sent.numel(), self._sent.numel())

    def decode(self, full: torch.Tensor) -> None:
        """Decode the bytes that were gathered into `full` (numel,), in place; no-op without a weight format."""
        if self.quantizer is not None and self.is_encoded:
            self.quantizer.decode(self._arrives(full), Region(0, full.numel()), full)

    def as_computed(self, full: torch.Tensor) -> torch.Tensor:
        """Return a copy of full main weights (numel,) in the compute dtype, rounded by the weight format."""
        computed = full.to(self._dtype, copy=True)
        if self.quantizer is not None:
            self.quantizer.round_into(full, Region(0, full.numel()), computed)
        return computed

    def measure(self) -> None:
        """Measure the amaxes of this rank's main weights for the weight format."""
        if self.quantizer is not None:
            main = self.main
            if main.local.device != self._device:
                main = FlatBuffer(main.layout, main.region, main.local.to(self._device))
            self.quantizer.measure(main)


def _main_buffer(plan: GroupPlan) -> FlatBuffer:
    region = plan.main_region
    memory = allocate(plan.offloads_main, region.numel, plan.precision.main_params, plan.device)
    return FlatBuffer(plan.layout, region, memory)


# These run over all parameters in every step; without a Python call for each they take a fraction of the time.
_local_tensor = attrgetter("_local_tensor")
_version = attrgetter("_version")
_backward_hooks = attrgetter("_backward_hooks")
_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")


class ParameterGroup:
    """Buffers and parameter objects of one group.

    `sharded` are the parameters that optimizer and checkpoint see: DTensors over local shards of the main weights.
    `full` are those that compute sees: plain tensors, views of gathered weights.
    """

    def __init__(
        self,
        plan: GroupPlan,
        originals: Sequence[nn.Parameter],
        shard_specs: tuple[ShardSpec, ...],
        quantizer: WeightQuantizer | None,
    ) -> None:
        self.plan = plan
        self._wrapping = quantizer if isinstance(quantizer, WrappingQuantizer) else None
        self.weights = WeightBuffers(plan, quantizer)
        # None for a group that has been frozen since it was made
        self.gradients = GradientBuffers(plan) if plan.requires_grad else None
        self.state_memory: Any = None  # of offloaded optimizer state, which optim/ allocates at the first step
        self.trainable = [plan.requires_grad] * len(originals)  # whether each takes gradients, as the ranks last agreed
        self.trained_since_attach = list(self.trainable)  # whether each took any since gradients were last attached
        self.grad_attribute: GradAttribute = GRAD  # attribute of the sharded parameters that holds their gradient
        self.weights.store_all([None if original.is_meta else local_tensor(original) for original in originals])
        register_with_torch()
        self.shard_specs = shard_specs  # for each parameter the elements that every rank holds
        self.own_hooks: set[int] = set()  # ids of gradient hooks that are not the user's
        self._hooked: set[int] = set()  # parameters that have one
        shards = self.weights.main.local_shards()
        # No views: they would keep the buffer object alive and share its version counter, so that in-place gathers into
        # the rest of the buffer would count as changes of the parameters.
        self.sharded = tuple(
            UnevenDTensor.as_parameter(shard.data, shard_spec, original.requires_grad)
            for shard, shard_spec, original in zip(shards, shard_specs, originals, strict=True)
        )
        places = zip(originals, self._make_placeholders(), strict=True)
        self.full = tuple(self._make_full(index, *place) for index, place in enumerate(places))
        self._has_parts = any(isinstance(param, DTensor) for param in self.full)
        self._placeholders: list[Any] = []  # made when memory is first given back, and then kept
        self._pointed_to: torch.Tensor | None = None  # memory that the full parameters are views of
        # The memory that they were views of last, and these views: units are gathered into the same memory over and
        # over, and making views takes longer than pointing parameters to them.
        self._viewed: torch.Tensor | None = None
        self._full_views: list[torch.Tensor] = []
        # Full weights that persist never move; those in a slot are pointed to when they are unsharded.
        if not plan.shards_compute_weights:
            self.point_full_to(self.weights.compute.local)
        self._pointers = self._find_pointers()
        self._seen_versions = -1
        self.note_installed()

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical parameter names, in layout order."""
        return tuple(info.name for info in self.plan.spec.parameters)

    def rename(self, names: Sequence[str]) -> None:
        """Set the canonical names, in layout order."""
        named = zip(self.plan.spec.parameters, names, strict=True)
        parameters = tuple(replace(info, name=name) for info, name in named)
        self.plan = replace(self.plan, spec=replace(self.plan.spec, parameters=parameters))

    @property
    def main_changed(self) -> bool:
        """True if main weights were written to since they were last installed.

        In-place operations count on the local tensor, whichever alias of the DTensor they go through, or on the memory
        behind it. Kernels that torch does not know count nowhere; optimizers are watched instead.
        """
        return self.weights.main_changed or self._versions() != self._seen_versions

    def note_installed(self) -> None:
        """Mark compute weights as equal to the main weights."""
        self.weights.seen_version = self.weights.main.local._version
        self._seen_versions = self._versions()

    def _versions(self) -> int:
        with plain_attributes():
            return sum(map(_version, map(_local_tensor, self.sharded)))

    def install(self) -> None:
        """Copy main weights into compute weights."""
        self.weights.install()
        if self._wrapping is not None and not self.plan.shards_compute_weights:
            self.decode(self.weights.compute.local)
        self.note_installed()

    def decode(self, full: torch.Tensor) -> None:
        """Decode gathered bytes in place, or pass them to the tensors that wrap them."""
        if self._wrapping is None:
            self.weights.decode(full)
            return
        for index, param in enumerate(self.full):
            self._wrapping.update(index, param, full)

    def release_wrapped(self) -> None:
        """Free tensors derived from gathered bytes, which are stale or about to be overwritten."""
        if self._wrapping is not None:
            for param in self.full:
                self._wrapping.release(param)

    def check_parameters(self) -> None:
        """Raise if a sharded parameter's memory was replaced; point replaced full ones to gathered weights again.

        A forward may cast modules for good (`self.classifier = self.classifier.to(torch.float32)`), which leaves a copy
        in a full parameter that no later update reaches; the next forward casts again.
        """
        with plain_attributes():
            if self._pointed_to is not None and self._was_cast():
                start, stop = self._pointed_to.storage_offset(), self._pointed_to.untyped_storage().nbytes()
                if (start + self._pointed_to.numel()) * self._pointed_to.itemsize <= stop:
                    self.point_full_to(self._pointed_to)
                else:  # another unit has the memory now; the next gather makes them point to it again
                    self.invalidate_full()
            if self._find_pointers() == self._pointers:
                return
        for index, (info, param) in enumerate(zip(self.plan.spec.parameters, self.sharded, strict=True)):
            if address_of(local_tensor(param)) != self._pointers[index]:
                raise ConfigurationError(
                    f"the data of {info.name} was replaced after the model was sharded, as by swap_tensors or by "
                    "moving or casting the inner module; copy into the parameter instead, under torch.no_grad()"
                )

    def _find_pointers(self) -> tuple[int, ...]:
        return addresses_of(tuple(map(_local_tensor, self.sharded)))

    def _was_cast(self) -> bool:
        """Return True if any full parameter is not a view of its memory any more."""
        # Plain, or tensor-parallel parts: those that wrap encoded weights are views of nothing.
        local: tuple[torch.Tensor, ...] = self.full
        if self._has_parts:
            local = tuple(map(local_tensor, self.full))
        return addresses_of(local) != addresses_of(self._full_views)

    @property
    def is_pointed(self) -> bool:
        """True if full parameters are views of the unit's memory, or wrap encoded weights."""
        return self._wrapping is not None or self._pointed_to is not None

    # ---- requires_grad ------------------------------------------------------------------------------------------

    @property
    def is_trainable(self) -> bool:
        """True if any parameter takes gradients."""
        return any(self.trainable)

    @property
    def reduces(self) -> bool:
        """True if the group joins the next reduction of its unit: gradients come, or wait to be reduced."""
        return self.gradients is not None and (
            any(self.trainable) or self.gradients.is_filling or self.gradients.has_unreduced_gradient
        )

    def set_trainable(self, trainable: Sequence[bool], has_unsynced: bool) -> None:
        """Set `requires_grad` of each full parameter; True needs memory for gradients (`begin_training`).

        `has_unsynced`: gradients have come since some were last attached.
        """
        self.trainable = list(trainable)
        self.trained_since_attach = [
            now or (before and has_unsynced) for now, before in zip(trainable, self.trained_since_attach, strict=True)
        ]
        for index, (param, is_trainable) in enumerate(zip(self.full, trainable, strict=True)):
            param.requires_grad_(is_trainable)
            if is_trainable:
                self._watch(self.sharded[index], index)

    def move_into(self, memory: torch.Tensor) -> None:
        """Move the send buffers of all-gathers into memory of a pool that keeps its addresses."""
        self.weights.move_into(self.plan, memory)
        if not self.plan.shards_compute_weights:
            self.point_full_to(self.weights.compute.local)
        self._move_sharded()

    def _move_sharded(self) -> None:
        """Move the sharded parameters to where the main weights are now."""
        shards = self.weights.main.local_shards()
        for param, shard, shard_spec in zip(self.sharded, shards, self.shard_specs, strict=True):
            moved: Any = param  # it stays the same object, maybe with another dtype
            DATA.__set__(moved, UnevenDTensor.wrap(shard.data, shard_spec))  # sets the dtype that torch sees
            moved._local_tensor, moved._spec = shard.data, shard_spec.dtensor_spec(shard.dtype)
        self._pointers = self._find_pointers()
        self.note_installed()

    def begin_training(self, plan: GroupPlan) -> None:
        """Allocate main weights and gradients of a frozen group; its compute weights stay where they are."""
        self.plan = plan
        if plan.has_main_copy:
            shared, self.weights.main = self.weights.main, _main_buffer(plan)
            self.weights.main.local.copy_(shared.local)
            self.weights.main_lies_in_compute = False
            self._move_sharded()
        self.gradients = GradientBuffers(plan)
        self.gradients.grad_attribute = self.grad_attribute

    def decouple_gradients(self) -> None:
        """Show gradients as `.decoupled_grad`, in the dtype they are accumulated in, and leave `.grad` None."""
        self.grad_attribute = DECOUPLED
        if self.gradients is not None:
            self.gradients.grad_attribute = DECOUPLED
            self.clear_grads()

    def grads(self) -> list[torch.Tensor | None]:
        """Return the gradient of each sharded parameter."""
        return get_grads(self.sharded, self.grad_attribute)

    def clear_grads(self) -> None:
        """Set the gradients of all sharded parameters to None."""
        for param in self.sharded:
            param.grad = None
            setattr(param, self.grad_attribute, None)

    def change_sharding(self, change: Callable[[Sharding], Sharding]) -> None:
        """Reduce gradients from now on by a sharding with another communication dtype, or another divisor."""
        assert self.plan.sharding is not None
        self.plan = change(self.plan.sharding).plan_again(self.plan)
        if self.gradients is not None:
            self.gradients.precision = self.plan.precision
            self.gradients.reducer.change_format(self.plan)
            self.gradients.reduces_in_place = self.plan.reduces_in_place
            self.gradients.bucket_views.clear()

    def describe_shard(self, index: int, shard: torch.Tensor) -> DTensor:
        """Wrap the local shard of tensor `index` as a DTensor of its global shape; no communication, no copy."""
        return UnevenDTensor.wrap(shard.view_as(shard), self.shard_specs[index])

    def describe_chunks(self, index: int, tensor: DTensor) -> DTensor:
        """Attach chunk functions to the local tensor of parameter `index`, or of its state."""
        if not self.shard_specs[index].is_whole:
            describe_chunks(tensor, self.shard_specs[index])
        return tensor

    def shard_like(self, index: int, full: torch.Tensor) -> DTensor:
        """Return this rank's shard of a full tensor, cut as parameter `index`; a copy."""
        flat = local_tensor(full.detach()).reshape(-1).to(self.weights.main.local.device)
        start, stop = self.plan.layout.range_in(index, self.weights.main.region)
        return self.describe_shard(index, flat[start:stop].clone().view(self.weights.main.local_shard(index).shape))

    def local_compute_weights(self) -> tuple[nn.Parameter, ...]:
        """Make sharded parameters in the compute dtype, over this rank's shard of the compute weights."""
        region = self.weights.main.region
        held = self.weights.compute.view_of(region)
        made = tuple(
            nn.Parameter(
                self.describe_shard(index, shard_view(self.plan.layout, region, held, index)),
                requires_grad=param.requires_grad,
            )
            for index, param in enumerate(self.sharded)
        )
        for index, param in enumerate(made):
            if param.requires_grad:
                # See Note [Weak references].
                moves = functools.partial(_move_gradient, weakref.ref(self), index)
                param.register_post_accumulate_grad_hook(moves)
        return made

    def point_full_to(self, full: torch.Tensor) -> None:
        """Point the full parameters into memory that holds (or will hold) the gathered weights, (numel,)."""
        with torch.inference_mode(False):  # evaluation may come first, and training must be able to save the views
            if self._wrapping is not None:
                self._point([self._wrapping.codes_in(full, index) for index in range(len(self.full))])
                return
            if self._viewed is not full:
                # `data` shares no version counter with the buffer: gathering writes into memory that autograd saved
                # views of; the bytes are the same again when backward reads them, so that is no modification.
                self._full_views = [full_view(self.plan.layout, full, index).data for index in range(len(self.full))]
                self._viewed = full
            self._point(self._full_views)
        self._pointed_to = full

    def _point(self, memories: Sequence[Any]) -> None:
        """Point the full parameters to one memory each."""
        for index, (param, memory) in enumerate(zip(self.full, memories, strict=True)):
            if self._wrapping is not None:
                self._wrapping.point(index, param, memory)
            elif isinstance(param, DTensor):
                param._local_tensor = memory
            else:
                param.data = memory

    def local_gradient(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient of full parameter `index` as a plain tensor of the shape in the layout."""
        part = self.plan.parts[index]
        local = grad if part is None else part.local_gradient(grad)
        return local if local.layout is torch.strided else local.to_dense()

    def invalidate_full(self) -> None:
        """Point the full parameters to a placeholder of their shapes: reading them must not touch freed memory."""
        with torch.inference_mode(False):
            self._placeholders = self._placeholders or self._make_placeholders()
            self._point(self._placeholders)
        self._pointed_to = None

    def _make_placeholders(self) -> list[Any]:
        """Make the placeholders of parameters, or of their codes: one element, expanded to the right shape."""
        if self._wrapping is not None:
            return [self._wrapping.blank_codes(index) for index in range(len(self.names))]
        with torch.inference_mode(False):
            zero = torch.zeros((), dtype=self.plan.precision.compute, device=self.plan.device)
            # `data`, so that the version counter of each is its own
            return [zero.expand(shape).data for shape in self.plan.layout.shapes]

    def _watch(self, param: nn.Parameter, index: int) -> None:
        """Register a hook on a sharded parameter, once, for gradients that autograd computes for it directly."""
        if index not in self._hooked:
            self._hooked.add(index)
            # See Note [Weak references].
            arrives = functools.partial(_of_autograd, weakref.ref(self), self.shard_specs[index], index)
            self.own_hooks.add(param.register_hook(arrives).id)

    def take_over(self, originals: Sequence[nn.Parameter], objects: Mapping[int, nn.Parameter]) -> None:
        """Give the sharded parameters the marks and hooks of the originals, and mark these as replaced.

        `objects`: by the id of an original the parameter, which an optimizer may hold, that becomes the sharded one.
        """
        sharded = []
        for index, (original, param) in enumerate(zip(originals, self.sharded, strict=True)):
            hooks = list((original._post_accumulate_grad_hooks or {}).values())
            if id(original) in objects:
                held = objects[id(original)]
                swap_tensors(held, param)
                param = held
                # Hooks stay with the object. Autograd finds them at the tensor beneath, where assignment puts them.
                param._backward_hooks, hooks = param._backward_hooks, []
                param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
            # Marks of the user have to survive, such as Megatron's `allreduce` and `sequence_parallel`.
            param.__dict__.update(original.__dict__)
            if original.requires_grad:
                self._watch(param, index)
                for hook in hooks:
                    param.register_post_accumulate_grad_hook(hook)  # called once the gradient is reduced
            sharded.append(param)
            setattr(original, REPLACED, self.plan.spec.parameters[index].name)
        self.sharded = tuple(sharded)

    def _make_full(self, index: int, original: nn.Parameter, empty: Any) -> nn.Parameter:
        part = self.plan.parts[index]
        empty = empty if self._wrapping is None else self._wrapping.wrap(index, empty)
        whole = empty if part is None or self._wrapping is not None else part.wrap(empty)
        param = nn.Parameter(whole, requires_grad=original.requires_grad)
        param.__dict__.update(original.__dict__)
        # Parametrizations begin by setting a parameter to itself, which would count as a change of what autograd saves.
        name = self.plan.spec.parameters[index].name
        param.set_ = functools.partial(_set_to_itself, name, id(param))  # type: ignore[assignment]
        for hook in (original._backward_hooks or {}).values():
            param.register_hook(hook)  # called with this rank's gradient before it is reduced, as under DDP
        return param

    # ---- hooks of the user --------------------------------------------------------------------------------------
    #
    # Autograd reaches the full parameters that compute uses, not the sharded ones that the user holds. So hooks of the
    # latter are called here, at each gradient sync, when all gradients are set:
    #
    # - `register_hook` first: called with the gradient; what it returns replaces it;
    # - `register_post_accumulate_grad_hook` then: called with the parameter; it may step an optimizer and clear the
    #   gradient.
    #
    # Both see the gradient after the sync, with earlier backwards that were not cleared, deferred ones included. They
    # run in the order of units, on every rank for the same parameters, and only for those that got a gradient. A
    # gradient that autograd computes for a sharded parameter itself (a penalty on `model.parameters()`) calls the hooks
    # right there, as for any tensor, and is part of what they see at the sync.

    @property
    def has_user_hooks(self) -> bool:
        """True if the user has hooks on gradients of sharded parameters."""
        with plain_attributes():
            keys = chain.from_iterable(filter(None, map(_backward_hooks, self.sharded)))
            return not self.own_hooks.issuperset(keys) or any(map(_accumulate_hooks, self.sharded))

    @torch.no_grad()
    def run_user_hooks(self, used: Sequence[bool]) -> None:
        """Call the user's gradient hooks on the sharded parameters that a sync renewed: those any rank `used`.

        A hook that returns what cannot replace the gradient, or would be ignored, is refused.
        """
        for index, param in enumerate(self.sharded if self.has_user_hooks else ()):
            if not used[index] or get_grad(param, self.grad_attribute) is None:
                continue
            for key, hook in list((param._backward_hooks or {}).items()):
                grad = get_grad(param, self.grad_attribute)
                answer = None if key in self.own_hooks or grad is None else hook(grad)
                if answer is not None:
                    self._replace_gradient(index, param, answer)
            for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                answer = hook(param)
                if answer is not None:
                    raise ConfigurationError(
                        f"a post-accumulate-grad hook of {self.names[index]} returned a {type(answer).__name__}, which "
                        "would be lost; change the gradient in place and return None"
                    )

    def _replace_gradient(self, index: int, param: nn.Parameter, answer: object) -> None:
        grad = get_grad(param, self.grad_attribute)
        assert isinstance(grad, DTensor)
        fits = isinstance(answer, DTensor) and (answer.shape, answer.dtype) == (grad.shape, grad.dtype)
        if not (fits and isinstance(answer, DTensor) and answer.to_local().shape == grad.to_local().shape):
            found = f"{answer.dtype} {tuple(answer.shape)}" if isinstance(answer, torch.Tensor) else "no tensor"
            raise ConfigurationError(
                f"a gradient hook of {self.names[index]} returned a {type(answer).__name__} ({found}) where the "
                f"gradient is a DTensor ({grad.dtype} {tuple(grad.shape)}); return None, or a DTensor of the same "
                "shape, dtype and sharding"
            )
        setattr(param, self.grad_attribute, answer)


def _set_to_itself(name: str, own_id: int, source: object, *_unused: object) -> object:
    """Ignore `set_` of a full parameter to itself; raise for other memory."""
    if id(source) != own_id:
        raise ConfigurationError(
            f"set_() of {name} inside of a forward would give it other memory than that of its unit; copy into the "
            "parameter instead, between forwards and under torch.no_grad()"
        )
    return source


def _move_gradient(group: weakref.ref[ParameterGroup], index: int, local: torch.Tensor) -> None:
    """Add the gradient of local compute weights, as of a penalty inside of a forward, to that of the sharded ones."""
    alive, grad, local.grad = group(), local.grad, None
    if alive is None or grad is None:
        return
    param = alive.sharded[index]
    own = _of_autograd(group, alive.shard_specs[index], index, grad.to(param.dtype))
    param.grad = own if param.grad is None else param.grad + own


def _of_autograd(
    group: weakref.ref[ParameterGroup], shard_spec: ShardSpec, index: int, grad: torch.Tensor
) -> torch.Tensor:
    """Shard a gradient that autograd has computed for sharded parameter `index` directly, as of a penalty."""
    alive = group()
    if alive is not None and alive.gradients is not None:  # else the model was deleted
        # Autograd adds what this returns to `.grad` in place. See Note [Who owns a main gradient].
        alive.gradients.detach_main_gradient(index, alive.sharded[index])
    sharded_grad = as_sharded(grad, shard_spec)  # the backward of a reduction gives gradients of the global shape
    # Each rank has its own gradient of the same quantity, such as `w.norm()`: they are averaged, or have to be equal
    # where gradients of ranks are added up.
    if not shard_spec.copy_groups:
        return sharded_grad
    return UnevenDTensor.wrap(unite_gradients(sharded_grad, shard_spec.copy_groups, shard_spec.adds_up), shard_spec)


def agree_on_amaxes(groups: Sequence[ParameterGroup], rank_meshes: Sequence[RankMesh]) -> None:
    """Measure the main weights of groups, all in a weight format, and agree on amaxes; collective.

    One all-reduce per data-parallel axis of each rank mesh, whatever the number of groups.

    Raises:
        NonFiniteWeightError: A weight is NaN or infinite; on every rank of the parameter.
    """
    for rank_mesh in rank_meshes:
        chosen = [group for group in groups if group.plan.rank_mesh is rank_mesh]
        quantizers = [group.weights.quantizer for group in chosen if group.weights.quantizer is not None]
        measured = [quantizer.amaxes for quantizer in quantizers if quantizer.amaxes.numel()]
        if not measured:
            continue
        for group in chosen:
            group.weights.measure()
        # One message per axis: each costs a latency, and a model has hundreds of groups.
        everything = torch.cat(measured)
        for axis in chosen[0].plan.axes:
            if axis.group is not None:
                dist.all_reduce(everything, op=dist.ReduceOp.MAX, group=axis.group)
        for amaxes, agreed in zip(measured, everything.split([each.numel() for each in measured]), strict=True):
            amaxes.copy_(agreed)
        # Agreed by now, so every rank of the parameter raises, and none waits in a later collective.
        if has_values(everything) and not everything.isfinite().all():
            name, form = next(
                (name, quantizer.format.name)
                for group in chosen
                if (quantizer := group.weights.quantizer) is not None
                for index, name in enumerate(group.names)
                if not quantizer.is_finite(index)
            )
            raise NonFiniteWeightError(
                f"{name} has an element that is NaN or infinite, which weight_format={form!r} cannot hold; load finite "
                "weights, or set check_for_nan_in_grad=True to find the gradient that it came from"
            )
