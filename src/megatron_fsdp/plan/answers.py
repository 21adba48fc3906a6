"""What a model is told when it asks for the value of a tensor that has none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fsdp.errors import ConfigurationError

_ATEN = torch.ops.aten


class Answers:
    """Runs operators; conditions on tensors of the meta device get the answer of a full, plain batch.

    Models ask whether nothing is padded (`mask.all()`): yes; or whether anything is odd (`x.isnan().any()`): no. So
    a condition is true, but that anything is so is false.
    """

    def __init__(self) -> None:
        self._any: Callable[[], object] = lambda: None  # the storage of the latest result of `any`, while it lives

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator's result, or an answer where it would be the value of a meta tensor.

        Grouped products are given their shapes here, because torch's rule for the meta device refuses all dtypes but
        bf16, which the kernels of devices do not.

        Raises:
            ConfigurationError: The value is a number, for which there is no plain answer.
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
        return tensor.untyped_storage() is not self._any()


def _grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, _bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Rows by a stack of matrices (2D x 3D, 3D x 2D), a stack by a stack, or stretches of columns by such of rows."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        groups = left.shape[0] if left.dim() == 3 or offs is None else offs.shape[0]
        shape = (groups, *shape)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)
