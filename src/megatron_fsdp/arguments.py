"""Arguments that are part of the API and not implemented yet: they exist, and only their defaults are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fsdp.errors import NotSupportedYetError

_SHARED: Mapping[str, Any] = {
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "disable_symmetric_registration": False,
}

CLASS_DEFAULTS: Mapping[str, Any] = {
    **_SHARED,
}
"""Of `MegatronFSDP`."""

FUNCTION_DEFAULTS: Mapping[str, Any] = {
    **_SHARED,
    "cuda_graph_mode": False,
}
"""Of `fully_shard` and `fully_shard_model`."""

CONFIG_DEFAULTS: Mapping[str, Any] = {
    "grad_reduce_in_fp32": False,
    "megatron_fsdp_version": 1,
    "align_param_gather": False,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "num_buckets": None,
    "pad_buckets_for_high_nccl_busbw": False,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "disable_symmetric_registration": False,
    "fsdp_manual_registration": False,
    "delay_wgrad_compute": False,
    "megatron_fsdp_cuda_graph_mode": False,
}
"""Fields of `DistributedDataParallelConfig` when it configures `MegatronFSDP`."""


def refuse_unsupported(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse values that would have no effect.

    Args:
        given: Value of each argument; those that `defaults` does not name are supported and not looked at.
        defaults: The only accepted value of each argument that is not implemented.

    Raises:
        NotSupportedYetError: Names every argument at fault.
    """
    at_fault = [
        f"{name}={given[name]!r} (default {default!r})"
        for name, default in defaults.items()
        if name in given and not _is_default(given[name], default)
    ]
    if at_fault:
        raise NotSupportedYetError(
            f"not supported yet: {', '.join(at_fault)}; this version accepts the default only, so leave it out"
        )


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)
