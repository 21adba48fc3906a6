"""`UnevenDTensor`: a DTensor whose shards may have any length."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.utils import _sync_module_states

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.dtensor.reduction import unite_gradients
from megatron_fsdp.dtensor.shard_spec import LocalChunks, ShardSpec, gather_full, no_write_items
from megatron_fsdp.errors import ConfigurationError, ShardOperationError
from megatron_fsdp.sharding.shards import Box, BufferCut, ListedCut, MeshUse, ShardDescription, TensorParallelCut

DATA: Any = torch.Tensor.data
"""Torch's own attribute."""


def _refuse_memory(name: str) -> Any:
    """Make a method that refuses access to memory: accelerate and safetensors ask for it before they write a file."""

    def refuse(*_unused: Any, **_named: Any) -> Any:
        raise ShardOperationError(
            f"{name} of a sharded tensor: it has no storage of all its elements, so that one rank's file (such as that "
            "of accelerator.save_state or of save_pretrained) would lack those of the others; use full_tensor() on "
            "every rank, or to_local() for this rank's elements; to save, call on all ranks "
            "save_checkpoint(model, optimizer, folder) of megatron_fsdp.checkpoint to resume, save_hf(model, folder) "
            "or save_adapter(model, folder) of megatron_fsdp.checkpoint.hf to write files for transformers or peft"
        )

    return refuse


class UnevenDTensor(DTensor):
    """A DTensor over shards of any length, cut between or inside rows: parameters, gradients and optimizer state.

    To torch it is a DTensor with a mesh, placements and a global shape, but torch never computes on it as if it were
    cut evenly: elementwise operations between tensors cut alike run on the local tensors; reductions to one number
    (`sum`, `mean`, `max`, `min`, `any`, `all`, norms) communicate; random fills draw the whole tensor and keep
    this rank's elements, so that equal seeds give what one process would have; `full_tensor` and `redistribute` gather
    by the true cut; everything else raises. Where every rank holds the whole tensor, any operation is allowed.

    Attributes:
        shard_spec: How it is cut, and over which ranks.
        used_for: Of a gradient that an optimizer has used in backward, the name of its parameter; then nobody may write
            to it.
    """

    shard_spec: ShardSpec
    used_for = ""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing, as torch's constructor needs; use `wrap`."""

    @classmethod
    def wrap(cls, local: torch.Tensor, spec: ShardSpec, requires_grad: bool = False) -> UnevenDTensor:
        """Wrap this rank's elements; no copy, no communication."""
        made: UnevenDTensor = cls(local, spec.dtensor_spec(local.dtype), requires_grad=requires_grad)
        made.shard_spec = spec
        return made

    @classmethod
    def as_parameter(cls, local: torch.Tensor, spec: ShardSpec, requires_grad: bool) -> nn.Parameter:
        """Wrap this rank's elements as a parameter, without the second tensor that `nn.Parameter` would make."""
        made: Any = cls.wrap(local, spec, requires_grad)
        made._is_param = True
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        start, stop = self.shard_spec.description.local_range
        return (
            f"UnevenDTensor(shape={tuple(self.shape)}, dtype={self.dtype}, placements={self.placements}, "
            f"local={self._local_tensor}, elements=[{start}, {stop}))"
        )

    def __float__(self) -> float:
        # Asked by torch.tensor([...]), where no operation of a subclass arrives any more.
        return float(self._local_tensor) if self.shard_spec.is_whole else super().__float__()

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec and not self.ndim else str(self), spec)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from megatron_fsdp.dtensor.dispatch import dispatch  # it needs this class, as this class needs it

        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """The same elements, detached; assignment takes this rank's elements of the value.

        What was an alias of the tensor before an assignment keeps its elements, as where memory is replaced.

        Raises:
            ShardOperationError: The value has another shape, dtype, device or cut.
        """
        found: torch.Tensor = DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        kept = self._local_tensor
        if getattr(value, "_local_tensor", None) is kept:
            return
        for word in ("shape", "dtype", "device"):
            given, own = getattr(value, word), getattr(self, word)
            if given != own:
                raise ShardOperationError(
                    f"`data` of a sharded tensor of {word} {own} was assigned a tensor of {word} {given}; values can "
                    f"be assigned at any time, but the {word} of a parameter is changed before the model is sharded"
                )
        with torch.no_grad():
            source = as_sharded(value.detach(), self.shard_spec)
            self._local_tensor = kept.data  # the memory, without its aliases
            torch._C._autograd._unsafe_set_version_counter((self._local_tensor,), (kept._version,))
            kept.data = kept.clone()
            self.copy_(source)

    def detach(self) -> torch.Tensor:
        """Return an alias without autograd history.

        Raises:
            ConfigurationError: The caller is torch's DistributedDataParallel, which begins by detaching all parameters
                to send those of the first rank to the others: the earliest sign that it wraps the model.
        """
        if sys._getframe(1).f_code is _sync_module_states.__code__:
            raise ConfigurationError(
                "torch's DistributedDataParallel is put around a model that megatron_fsdp has sharded and whose "
                "gradients it reduces; train the sharded model as it is, and hand it to nothing that wraps models "
                "(mfsdp docs integrations has recipes for accelerate, Lightning and Fabric)"
            )
        return super().detach()

    __array__, __dlpack__, numpy, share_memory_, storage, tolist, untyped_storage = map(
        _refuse_memory, ("numpy.asarray", "dlpack", "numpy", "share_memory_", "storage", "tolist", "untyped_storage")
    )

    def data_ptr(self) -> int:
        """Return 0: no memory holds all elements."""
        return 0  # torch would give the offset of this rank's elements in their memory

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's elements; in backward, their gradient is this rank's gradient.

        Raises:
            ShardOperationError: `grad_placements` is given and differs from the tensor's own.
        """
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise ShardOperationError(
                f"to_local(grad_placements={tuple(grad_placements)}) of a tensor placed as {self.placements} would "
                "give its gradient another cut; leave the argument out"
            )
        if not torch.is_grad_enabled():
            return self._local_tensor
        return _ToLocal.apply(self)  # type: ignore[no-untyped-call]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """All-gather the whole tensor; collective over the ranks that hold different elements.

        Gradients that come back are averaged over ranks (`unite_gradients`); each rank keeps its own elements.

        Raises:
            ShardOperationError: `grad_placements` is given and is not all `Replicate()`.
        """
        if any(not placement.is_replicate() for placement in grad_placements or ()):
            raise ShardOperationError(
                f"full_tensor(grad_placements={tuple(grad_placements or ())}): only a gradient that is the same on "
                "every rank (Replicate) can be brought back to shards; leave the argument out"
            )
        return _FullTensor.apply(self)  # type: ignore[no-untyped-call]

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,  # noqa: ARG002
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return a stock DTensor with other placements on the same mesh, by gathering the whole tensor.

        Args:
            device_mesh: The tensor's own, or None.
            placements: Wanted; the tensor's own give the tensor itself, with its own cut.
            async_op: Ignored; the result is always ready.
            forward_dtype: None.
            backward_dtype: None.

        Raises:
            ShardOperationError: Another mesh, no or partial placements, or a dtype.
        """
        wanted = tuple(placements or ())
        other_mesh = device_mesh is not None and device_mesh != self.device_mesh
        if other_mesh or len(wanted) != self.device_mesh.ndim or any(placement.is_partial() for placement in wanted):
            raise ShardOperationError(
                f"redistribute to {wanted} on {device_mesh or self.device_mesh}: give one Shard or Replicate for each "
                f"dimension of the tensor's own mesh, {self.device_mesh}"
            )
        if forward_dtype is not None or backward_dtype is not None:
            raise ShardOperationError("redistribute of uneven shards takes no dtypes; cast before or after it")
        if wanted == self.placements:
            return self
        everywhere = [Replicate()] * self.device_mesh.ndim
        whole = DTensor.from_local(self.full_tensor(), self.device_mesh, everywhere, run_check=False)
        return whole if wanted == tuple(everywhere) else whole.redistribute(placements=wanted)

    # ---- copies -----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> UnevenDTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaves can be deep-copied; detach the tensor first")
        made = _rebuild(
            self._local_tensor.detach().clone(), self.shard_spec, self.requires_grad, isinstance(self, nn.Parameter)
        )
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        for key, value in self.__dict__.items():
            if key not in _OWN and not isinstance(
                value, weakref.ProxyTypes
            ):  # a reference to the model, to which the copy does not belong
                made.__dict__[key] = copy.deepcopy(value, memo)
        return made

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        spec = self.shard_spec
        local = self._local_tensor.detach().clone()
        is_parameter = isinstance(self, nn.Parameter)
        return _unpickle, (local, spec.mesh, spec.description, self.requires_grad, is_parameter)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if TracingContext.try_get() is not None:
            raise ShardOperationError(
                "torch.compile cannot trace sharded tensors of uneven shards, as in the step of an optimizer that "
                "compiles itself (such as torchao's AdamW8bit): use an optimizer of torch.optim or megatron_fsdp's own "
                "AdamW8bit, and compile units before fully_shard"
            )
        return ["_local_tensor"], (self.shard_spec, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], flatten_spec: Any, _outer_size: Any, _outer_stride: Any
    ) -> UnevenDTensor:
        spec, requires_grad = flatten_spec
        return UnevenDTensor.wrap(inner_tensors["_local_tensor"], spec, requires_grad)

    # ---- what torch.distributed.checkpoint asks ---------------------------------------------------------------------

    def _chunks(self) -> LocalChunks:
        return LocalChunks.of_spec(self._local_tensor, self.shard_spec)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks().chunk_list()

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return self._chunks().write_items(fqn, None)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._chunks().shard_at(self._local_tensor, index)


_OWN = frozenset({"shard_spec", "_is_param"})


def _rebuild(local: torch.Tensor, spec: ShardSpec, requires_grad: bool, is_parameter: bool) -> UnevenDTensor:
    made = UnevenDTensor.wrap(local, spec)
    if is_parameter:
        return nn.Parameter(made, requires_grad=requires_grad)  # type: ignore[return-value]
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


def _unpickle(
    local: torch.Tensor, mesh: DeviceMesh, description: ShardDescription, requires_grad: bool, is_parameter: bool
) -> UnevenDTensor:
    """Rebuild a tensor of the rank that pickled it, whatever rank this is."""
    spec = ShardSpec(mesh, description)
    spec.is_from_file = True
    return _rebuild(local, spec, requires_grad, is_parameter)


class _ToLocal(torch.autograd.Function):
    """Forward: the local tensor. Backward: its gradient as a DTensor."""

    @staticmethod
    def forward(ctx: Any, tensor: UnevenDTensor) -> torch.Tensor:
        ctx.spec = tensor.shard_spec
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return UnevenDTensor.wrap(grad.contiguous(), ctx.spec)


class _FullTensor(torch.autograd.Function):
    """Forward: all-gather. Backward: all-reduce the gradients of all ranks, and take this rank's elements."""

    @staticmethod
    def forward(ctx: Any, tensor: UnevenDTensor) -> torch.Tensor:
        ctx.spec = tensor.shard_spec
        return gather_full(tensor._local_tensor, tensor.shard_spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        united = unite_gradients(grad, ctx.spec.shard_groups, ctx.spec.adds_up)
        return UnevenDTensor.wrap(ctx.spec.take(united).contiguous(), ctx.spec)


class _Probe(DTensor):
    """A DTensor subclass with a `__torch_dispatch__`, to test if torch calls it."""

    @classmethod
    def __torch_dispatch__(cls, _func: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        return torch.zeros(())


def _subclasses_are_asked() -> bool:
    probe = torch.Tensor._make_wrapper_subclass(_Probe, ())
    try:
        torch.ops.aten.detach.default(probe)
    except AttributeError:  # taken for a stock DTensor, whose placements it lacks
        return False
    return True


def _register_rules() -> dict[str, torch.library.Library]:
    """Register `UnevenDTensor.__torch_dispatch__` operation by operation.

    torch 2.11 computes subclasses of DTensor as if they were stock DTensors and never calls their `__torch_dispatch__`,
    but it asks for rules of the exact class before that. Operations of libraries that are loaded later have none; torch
    refuses those of which it does not know how they shard.
    """
    rule = UnevenDTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
    libraries: dict[str, torch.library.Library] = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace = name.partition("::")[0]
        if namespace not in libraries:
            libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        torch.library.register_torch_dispatch(name, UnevenDTensor, rule, lib=libraries[namespace])
    return libraries


_RULES = {} if _subclasses_are_asked() else _register_rules()


@functools.cache
def register_with_torch() -> None:
    """Register these tensors for torch's list kernels and for loading with `weights_only`, as DTensors are.

    What would give them other memory (moving or casting modules, swaps) does nothing where they keep it, or is refused
    in words. torch keeps both as lists of exact classes. Where torch distributes whole tensors that it has broadcast,
    it cuts them into equal shards without asking the DTensor; ours are cut before that.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if UnevenDTensor not in supported:
            supported.append(UnevenDTensor)
    for name in ("dirac_", "eye_", "orthogonal_", "sparse_"):
        setattr(nn.init, name, _of_the_whole(getattr(nn.init, name)))
    torch.utils.swap_tensors = _unless_sharded(swap_tensors)
    nn.Module._apply = _checked(nn.Module._apply)  # type: ignore[method-assign]
    distribute = getattr(_state_dict_utils, "_distribute_tensors", None)
    if distribute is not None:
        _state_dict_utils._distribute_tensors = functools.partial(_cut_as_ours, distribute)
    torch.serialization.add_safe_globals(
        [UnevenDTensor, _unpickle, no_write_items, ShardDescription, MeshUse, BufferCut, ListedCut, TensorParallelCut]
    )


def _of_the_whole(initialize: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make an initialiser that addresses rows or columns draw the whole tensor for a sharded one."""

    @functools.wraps(initialize)
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, UnevenDTensor) or tensor.shard_spec.is_whole:
            return initialize(tensor, *args, **kwargs)
        whole = initialize(tensor._local_tensor.new_empty(tensor.shape), *args, **kwargs)
        with torch.no_grad():
            return tensor.copy_(as_sharded(whole, tensor.shard_spec))

    return run


swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
"""Torch's own function, for us: `torch.utils.swap_tensors` raises for sharded tensors once a model is sharded."""


def _unless_sharded(swap: Callable[..., None]) -> Callable[..., None]:
    """Make `swap_tensors`, by which torch converts and parametrizes modules, raise for sharded tensors."""

    @functools.wraps(swap)
    def run(t1: torch.Tensor, t2: torch.Tensor) -> None:
        sharded = [each for each in (t1, t2) if isinstance(each, UnevenDTensor)]
        if not sharded:
            swap(t1, t2)
        elif getattr(t1, "_local_tensor", t1) is not getattr(t2, "_local_tensor", t2):
            raise ShardOperationError(
                f"a sharded parameter of shape {tuple(sharded[0].shape)} would be swapped for other memory, by "
                "swap_tensors as parametrizations and conversions use it; change the model before it is sharded, or "
                "copy values into the parameter under torch.no_grad()"
            )

    return run


def _checked(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Make `nn.Module._apply` check all parameters before it converts the first."""

    @functools.wraps(apply)
    def run(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        check_conversion(self.parameters(recurse), fn)
        return apply(self, lambda each: each if isinstance(each, UnevenDTensor) else fn(each), recurse)

    return run


_NUMBERS = itertools.count(1)


def check_conversion(params: Iterable[torch.Tensor], fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise if a function would move or cast sharded parameters, which are views of flat buffers."""
    for dtype, device in {(each.dtype, each.device): None for each in params if isinstance(each, UnevenDTensor)}:
        number = next(_NUMBERS)  # bits that no freed memory has
        given = torch.tensor([number >> bit & 1 for bit in range(32)]).to(device, dtype)
        moved = fn(given)
        if (moved.dtype, moved.device) != (dtype, device):
            raise ConfigurationError(
                f"a sharded model cannot be moved or cast (from {dtype} on {device} to {moved.dtype} on "
                f"{moved.device}); do that before fully_shard, or choose dtypes by MixedPrecisionPolicy"
            )
        # A copy, such as that of to("cpu:0"), changes nothing; to_empty would.
        if moved is not given and not torch.equal(moved.view(torch.uint8), given.view(torch.uint8)):
            raise ConfigurationError(
                f"a sharded model cannot be given other memory (of {dtype} on {device}, by to_empty or a function for "
                "_apply); do that before fully_shard, which also takes models on the meta device, or write values "
                "into the parameters under torch.no_grad()"
            )


def _cut_as_ours(
    distribute: Callable[..., None],
    local_state_dict: dict[str, Any],
    keys: Sequence[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Copy whole tensors into this package's DTensors during a load, as torch does for its own."""
    for key in keys:
        found = local_state_dict.get(key)
        if isinstance(found, tuple) and isinstance(found[0], UnevenDTensor):
            shard, full = found
            fits = full.shape == shard.shape
            if fits:
                shard._local_tensor.copy_(shard.shard_spec.take(full))
            local_state_dict[key] = shard if fits else full  # a misfit, which `load_state_dict` refuses or handles
    distribute(local_state_dict, keys, *args, **kwargs)


def as_sharded(grad: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Reshard a gradient like its parameter.

    The backward of a reduction gives gradients of the global shape, the same on every rank; each rank keeps its own
    elements.
    """
    if isinstance(grad, UnevenDTensor):
        return grad
    if isinstance(grad, DTensor):
        if not all(placement.is_replicate() for placement in grad.placements):
            raise ShardOperationError(
                f"a gradient placed as {grad.placements} has reached a parameter with shards of its own lengths; "
                "redistribute it to Replicate first"
            )
        grad = grad._local_tensor
    return UnevenDTensor.wrap(spec.take(grad).contiguous(), spec)


# ---- boxes of any DTensor: from its description, else from the local shapes of all ranks -----------------------------


def boxes_here(tensor: DTensor) -> tuple[Box, ...]:
    """Return this rank's boxes, in the order of the local elements; collective for tensors without a description."""
    if isinstance(tensor, UnevenDTensor):
        return tensor.shard_spec.description.boxes()
    local = tensor._local_tensor
    if hasattr(local, "__create_chunk_list__"):
        return tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in local.__create_chunk_list__())
    chunk = asked_chunk(tensor)
    return (Box(tuple(chunk.offsets), tuple(chunk.sizes)),)


def sharded_dims(tensor: DTensor) -> tuple[int, ...]:
    """Return the mesh dimensions that a DTensor of torch is sharded over, the last split first."""
    strided = []
    for dim, placement in enumerate(tensor.placements):
        if type(placement).__name__ == "_StridedShard":  # private, and a subclass of Shard in some versions only
            strided.append(dim)
        elif not isinstance(placement, Shard) and not placement.is_replicate():
            raise ValueError(
                f"a DTensor placed as {tensor.placements} has no shards to describe; use Shard or Replicate"
            )
    if len(strided) > 1:
        raise ValueError(f"a DTensor placed as {tensor.placements} has several strided shards; only one is offered")
    given = getattr(tensor.device_mesh, "_shard_order", None)
    if given is not None:
        order = list(reversed(given))
    else:
        order = [*strided, *(dim for dim in reversed(range(tensor.device_mesh.ndim)) if dim not in strided)]
    return tuple(dim for dim in order if not tensor.placements[dim].is_replicate())


def asked_chunk(tensor: DTensor) -> ChunkStorageMetadata:
    """Compute the local chunk from the local shapes of all ranks: one small collective per sharded mesh dimension."""
    sizes = list(tensor._local_tensor.shape)
    if len(sizes) != tensor.ndim:
        raise ValueError(
            f"the local tensor of shape {tuple(sizes)} says nothing about its place in a DTensor of shape "
            f"{tuple(tensor.shape)}; give it as many dimensions, or attach __create_chunk_list__ to it"
        )
    offsets = [0] * len(sizes)
    running = list(sizes)
    for mesh_dim in sharded_dims(tensor):
        dim = tensor.placements[mesh_dim].dim  # type: ignore[attr-defined]
        group = tensor.device_mesh.get_group(mesh_dim)
        lengths = gather_objects(running[dim], group)
        offsets[dim] += sum(lengths[: tensor.device_mesh.get_local_rank(mesh_dim)])
        running[dim] = sum(lengths)
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
