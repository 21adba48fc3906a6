"""Tensor parallelism for models of transformers: layers divided over ranks by torch's parallel styles."""

from megatron_fsdp.automodel.tensor_parallel.parallelize import (
    enable_async_tensor_parallel,
    parallelize_tensors,
)

__all__ = ["enable_async_tensor_parallel", "parallelize_tensors"]
