"""Activation memory and FLOPs of one forward and backward, measured on the meta device.

Tensors on the meta device have shapes and storages of a size, but no bytes. Autograd saves, frees and accumulates them
as it does real ones, so following storages through one step on the meta device gives the activation memory of a real
step; only memory that kernels allocate inside themselves is not seen.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.library import _scoped_library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megatron_fsdp.engine.hooks import tensors_in
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.compute_profile import ComputeProfile, Event, Segment
from megatron_fsdp.plan.models import balanced_experts
from megatron_fsdp.plan.recompute import PRODUCTS, recomputing
from megatron_fsdp.plan.setup import Recompute
from megatron_fsdp.sharding.units import ROOT_UNIT

Kernels = Literal["cuda", "cpu", "math"]
"""Kernels of a CUDA device, of a CPU, or of neither: attention by matrix products, whose operations are those of the
model, without what kernels compute again in backward."""

_ATEN = torch.ops.aten
_PLAIN = (Tensor, nn.Parameter)
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD_DIM = 256


def profile_compute(
    model: nn.Module,
    inputs: Any,
    *,
    unit_names: Sequence[str],
    loss_fn: Callable[[Any], Tensor] | None = None,
    kernels: Kernels = "cuda",
    recompute: Recompute = "none",
) -> ComputeProfile:
    """Run forward, loss and backward once; record activation bytes and FLOPs between the units' events.

    The step is ``loss_fn(model(inputs)).backward()``: the model's output is not kept during backward. A parameter's
    gradient dies as soon as it is complete, as the engine copies it into a bucket and drops it. Nothing is allocated on
    the meta device; other devices do the real work. Inputs are a mapping (keyword arguments), a tuple (positional ones)
    or one tensor; `unit_names` begin with the root's; without `loss_fn` the loss is the output's `loss`, or the output
    itself.
    """
    recorder = _Recorder({param.untyped_storage()._cdata: name for name, param in model.named_parameters()})
    with balanced_experts(model), recomputing(model, unit_names, recompute), torch.inference_mode(False):
        with torch.enable_grad(), recorder.hooked(model, unit_names), kernels_of(kernels), recorder:
            loss = scalar_loss(call_model(model, inputs), loss_fn)
            loss.backward()
        recorder.mark(Event.BACKWARD_ENDS, ROOT_UNIT)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors_in(inputs)}
    return ComputeProfile(tuple(unit_names), recorder.finish(), sum(storages.values()))


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with keyword arguments (a mapping), positional ones (a tuple) or one tensor."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def scalar_loss(output: Any, loss_fn: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the loss of a model's output: by `loss_fn`, else the output's `loss`, else the output itself."""
    loss = loss_fn(output) if loss_fn is not None else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigurationError(
            f"the profile needs a scalar loss with a gradient and got {found} from "
            f"{'loss_fn' if loss_fn is not None else 'the model'}; give a loss_fn, or labels to a model that has a loss"
        )
    return loss


class _Recorder(TorchDispatchMode):
    """A dispatch mode that records every operator, and the events of hooks."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without hints
        self._names = names  # of parameters, by storage
        self.in_backward = False
        self._live = LiveStorages()
        self._answers = Answers()
        self._open = Segment(Event.STEP_BEGINS, ROOT_UNIT, 0, 0)
        self._segments = [self._open]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self._answers.run(func, args, kwargs)
        operands, results = tensors_of((args, kwargs)), tensors_of(result)
        self._live.note(operands, results)
        segment = self._open
        segment.peak_bytes = max(segment.peak_bytes, self._live.now_bytes)
        moved = operator_bytes(func, operands, results)
        flops = operator_flops(func, args, kwargs, result)
        segment.moved_bytes += moved
        segment.operators += moved > 0
        segment.flops += flops
        segment.product_flops += flops * (func.overloadpacket in PRODUCTS)
        if self.in_backward and torch.is_grad_enabled():  # backward itself computes without a graph
            segment.recomputed_flops += flops
        elif self.in_backward and func.overloadpacket in PRODUCTS:
            storages = {operand.untyped_storage()._cdata for operand in operands}
            segment.multiplied.update(self._names[storage] for storage in storages & self._names.keys())
        return result

    def mark(self, event: Event, unit: int) -> None:
        """End the open segment and begin the next one."""
        if event in (Event.BACKWARD_BEGINS, Event.BACKWARD_ENDS):
            self.in_backward = event is Event.BACKWARD_BEGINS
        self._open = Segment(event, unit, self._live.now_bytes, self._live.now_bytes)
        self._segments.append(self._open)

    def finish(self) -> tuple[Segment, ...]:
        """Return all segments; the first only if it computed something."""
        return tuple(self._segments if self._segments[0].operators else self._segments[1:])

    @contextmanager
    def hooked(self, model: nn.Module, unit_names: Sequence[str]) -> Iterator[None]:
        """Register hooks at the same places as the engine's."""
        with ExitStack() as hooks:
            for unit, name in enumerate(unit_names):
                module = model.get_submodule(name)
                begins, ends = partial(self._forward_begins, unit), partial(self._forward_ends, unit)
                hooks.enter_context(module.register_forward_pre_hook(begins, prepend=True))
                hooks.enter_context(module.register_forward_hook(ends, always_call=True))
            for name, param in model.named_parameters():
                if param.grad is not None:
                    raise ConfigurationError(
                        f"{name} has a gradient already; profile a model before its first backward"
                    )
                if param.requires_grad:
                    hooks.enter_context(param.register_post_accumulate_grad_hook(partial(self._gradient, name)))
            yield

    def _forward_begins(self, unit: int, *_: object) -> None:
        self.mark(Event.FORWARD_BEGINS, unit)

    def _forward_ends(self, unit: int, _module: nn.Module, _args: Any, output: Any) -> None:
        self.mark(Event.FORWARD_ENDS, unit)
        begins = functools.cache(partial(self.mark, Event.BACKWARD_BEGINS, unit))  # the first gradient counts
        for tensor in tensors_in(output) if torch.is_grad_enabled() else ():
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _grad: begins())

    def _gradient(self, name: str, param: Tensor) -> None:
        """Record that a parameter's gradient is complete, and drop it."""
        self._open.gradients.append(name)
        param.grad = None


# ---- live storages --------------------------------------------------------------------------------------------------


def tensors_of(values: object) -> list[Tensor]:
    """Return the plain tensors among the arguments or results of an operator."""
    return [value for value in tree_leaves(values) if type(value) in _PLAIN]


class LiveStorages:
    """Sums the sizes of storages until they are freed. Views share a storage; meta storages have sizes, too."""

    def __init__(self) -> None:
        self.now_bytes = 0  # alive now
        self._sizes: dict[int, int] = {}

    def note(self, operands: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Track the storages of an operator's results, except those shared with its operands."""
        known = {tensor.untyped_storage()._cdata for tensor in operands}
        for tensor in results:
            storage = tensor.untyped_storage()
            key = storage._cdata
            # A parameter or an input of the step, which are not activations.
            if key in known and key not in self._sizes:
                continue
            if key not in self._sizes:
                weakref.finalize(storage, _dies, weakref.ref(self), key).atexit = False
            self.now_bytes += storage.nbytes() - self._sizes.get(key, 0)
            self._sizes[key] = storage.nbytes()


def _dies(reference: weakref.ref[LiveStorages], key: int) -> None:
    live = reference()
    if live is not None:
        live.now_bytes -= live._sizes.pop(key)


# ---- answers for the values of tensors without values ----------------------------------------------------------------


class Answers:
    """Runs operators, and answers conditions on meta tensors as for a full batch without unusual values.

    Models check that nothing is padded (`mask.all()`) or that something is unusual (`x.isnan().any()`). So every
    condition is True, except that `any` is False.
    """

    def __init__(self) -> None:
        self._any: Callable[[], object] = lambda: None  # the storage of the latest result of `any`, while it lives

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the operator's result, or an answer for the value of a meta tensor.

        Grouped products get their shapes here, because torch's rule for the meta device refuses all dtypes but bf16,
        which device kernels accept.
        """
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            return self._answer(args[0])
        if func is _ATEN._grouped_mm.default and args[0].is_meta:
            return _grouped_product(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            raise ConfigurationError(
                f"{func} has no shape without values, or none on the meta device; profile a model whose shapes do not "
                f"depend on data ({' '.join(str(error).split())[:200]})"
            ) from error
        if func.overloadpacket is _ATEN.any and isinstance(result, Tensor):
            self._any = weakref.ref(result.untyped_storage())
        return result

    def _answer(self, tensor: Tensor) -> bool:
        if tensor.dtype != torch.bool:
            raise ConfigurationError(
                f"the model asks for the value of a tensor ({tensor.dtype}) in its forward or backward, and a profile "
                "has shapes but no values; profile a model whose shapes do not depend on data"
            )
        # True for every condition but the latest `any`, by identity of its memory.
        return tensor.untyped_storage() is not self._any()


def _grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, _bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Infer the shape of a grouped matrix product: 2D x 3D and 3D x 2D (rows), 3D x 3D, or 2D x 2D (columns)."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 or offs is None else offs.shape[0]
        shape = (groups, *shape)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


# ---- the cost of one operator: products by torch's formulas (a multiply-add is two), all else as bandwidth -----------


def operator_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Count the floating point operations of one operator call."""
    packet = func.overloadpacket
    own = _OWN.get(packet)
    if own is not None:
        return own(args)
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def operator_bytes(func: Any, operands: Iterable[Tensor], results: Iterable[Tensor]) -> int:
    """Count the bytes of one call's operands and results; 0 for views and uninitialized memory.

    A lookup in a table counts only the rows that it reads.
    """
    packet = func.overloadpacket
    if packet in _WRITES_NOTHING or func.is_view:
        return 0
    if packet in _LOOKS_UP:
        return 2 * sum(map(_size, results))
    return sum(map(_size, (*operands, *results)))


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; an expanded dimension is read once."""
    lengths = [length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or length == 0]
    return math.prod(lengths) * tensor.element_size()


def _attention(args: Sequence[Any]) -> int:
    return int(sdpa_flop_count(*_per_head(args[:3])))


def _attention_backward(args: Sequence[Any]) -> int:
    return int(sdpa_backward_flop_count(args[0].shape, *_per_head(args[1:4])))


def _per_head(tensors: Sequence[Tensor]) -> list[torch.Size]:
    """Return the shapes of query, key and value as if each query head had a key head of its own."""
    query, key, value = tensors
    heads = query.shape[1]
    return [torch.Size((shape[0], heads, *shape[2:])) for shape in (query.shape, key.shape, value.shape)]


def _grouped_flops(args: Sequence[Any]) -> int:
    """Count FLOPs: each row by one matrix of a stack, or each stretch of columns by its stretch of rows."""
    left, right = args[0], args[1]
    stacked = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return int(2 * stacked * left.shape[-2] * left.shape[-1] * right.shape[-1])


_OWN: dict[Any, Callable[[Sequence[Any]], int]] = {
    _ATEN._scaled_dot_product_flash_attention: _attention,  # torch 2.11 counts no shared key heads
    _ATEN._scaled_dot_product_flash_attention_backward: _attention_backward,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN._grouped_mm: _grouped_flops,
}

_WRITES_NOTHING = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}

_LOOKS_UP = {_ATEN.embedding, _ATEN.index_select, _ATEN.index, _ATEN.gather}


# ---- the kernels that a device would choose, where the choice decides what is saved for backward ---------------------
# On the meta device torch takes composite functions apart as no real device does: attention becomes a product, a
# softmax and a product, which saves the square of the sequence length. The operators that the named device would run
# know their results' shapes on the meta device as well.


@contextmanager
def kernels_of(kernels: Kernels) -> Iterator[None]:
    """Replace attention, dropout and RMS norm on the meta device by a device's operators inside the block.

    The functions are replaced in torch's dispatcher, for tensors of the meta device only, so every caller gets the
    replacement: transformers, `nn.MultiheadAttention`, a recomputed forward. Attention on "cuda": flash attention for
    half precision without a mask and heads of one size up to 256, otherwise memory-efficient attention; on "cpu": its
    flash attention if nothing is dropped, heads have one size and the mask takes no gradient. These keep queries, keys,
    values, results and one fp32 number per query and head. Otherwise, and for "math", products, which keep all scores.
    """
    with _scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", partial(_attend, kernels), "AutogradMeta")
        if kernels == "cuda":
            library.impl("dropout", _fused_dropout, "AutogradMeta")
            library.impl("rms_norm", _fused_rms_norm, "AutogradMeta")
        yield


def _attend(
    kernels: Kernels,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Run `scaled_dot_product_attention` by the operator that a device would choose."""
    if mask is not None and mask.dtype == torch.bool:  # torch adds a mask to scores, too
        kept, masked = (torch.scalar_tensor(x, dtype=query.dtype, device="meta") for x in (0.0, float("-inf")))
        mask = torch.where(mask, kept, masked)
    given, scale = (query, key, value), options.get("scale")
    is_plain = all(tensor.dim() == 4 and tensor.numel() > 0 for tensor in given)
    has_one_head_size = len({tensor.shape[-1] for tensor in given}) == 1
    fits_flash = query.dtype in _HALF and query.shape[-1] <= _FLASH_HEAD_DIM
    results: tuple[Tensor, ...]
    if kernels == "cpu" and is_plain and has_one_head_size and not dropout_p and not _takes_gradient(mask):
        flash = _ATEN._scaled_dot_product_flash_attention_for_cpu
        results = flash(*given, dropout_p, is_causal, attn_mask=mask, scale=scale)
    elif kernels == "cuda" and is_plain and has_one_head_size and mask is None and fits_flash:
        results = _ATEN._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, False, scale=scale)
    elif kernels == "cuda" and is_plain and query.shape[1] == key.shape[1] and query.dtype != torch.float64:
        mask = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        needs_grad = torch.is_grad_enabled() and any(map(_takes_gradient, given))
        efficient = _ATEN._scaled_dot_product_efficient_attention
        results = efficient(*given, mask, needs_grad, dropout_p, is_causal, scale=scale)
    else:
        results = _ATEN._scaled_dot_product_attention_math(*given, mask, dropout_p, is_causal, None, **options)
    return results[0]


def _takes_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _fused_dropout(given: Tensor, p: float, train: bool) -> Tensor:
    """Run CUDA's fused dropout, which saves a mask of one byte per element; the others save the input's dtype."""
    if not train or p == 0 or given.numel() == 0:
        return given
    result: Tensor = _ATEN.native_dropout(given, p, True)[0]
    return result


def _fused_rms_norm(given: Tensor, shape: list[int], weight: Tensor | None = None, _eps: float | None = None) -> Tensor:
    """Run RMS norm as one kernel per direction, like CUDA; the meta device would decompose it."""
    result: Tensor = _RmsNorm.apply(given, weight, len(shape))  # type: ignore[no-untyped-call]  # torch's own
    return result


class _RmsNorm(torch.autograd.Function):
    """RMS norm that saves the input, the weight and one number per row (fp32 for half precision)."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        dtype = torch.float32 if given.dtype in _HALF else given.dtype
        scale = given.new_empty((*given.shape[: given.dim() - dims], *(1 for _ in range(dims))), dtype=dtype)
        ctx.save_for_backward(given, weight, scale)
        return given * 1 if weight is None else given * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        given, weight, _ = ctx.saved_tensors
        wanted = weight is not None and ctx.needs_input_grad[1]
        return grads[0] * given, torch.empty_like(weight) if wanted else None, None
