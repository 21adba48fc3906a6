"""Tensor parallelism for models of transformers: layers divided over ranks by torch's parallel styles."""

from megatron_fsdp.automodel.tensor_parallel.asynchronous import enable_async_tensor_parallel
from megatron_fsdp.automodel.tensor_parallel.parallelize import AppliedPlan, parallelize_tensors

__all__ = ["AppliedPlan", "enable_async_tensor_parallel", "parallelize_tensors"]
