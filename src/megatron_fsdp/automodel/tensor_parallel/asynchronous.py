"""Asynchronous tensor parallelism: the compiler cuts a product and its collective into steps that overlap."""

from __future__ import annotations

import warnings

from torch.distributed.device_mesh import DeviceMesh


def enable_async_tensor_parallel(tp_mesh: DeviceMesh) -> bool:
    """Let inductor overlap the gathers and reduce-scatters of sequence parallelism with the products beside them.

    It needs compiled layers, and devices that reach each other's memory. Where those are missing, one warning says so
    and nothing is changed. The switch is inductor's own and counts for the whole process.

    Args:
        tp_mesh: The tensor-parallel ranks.

    Returns:
        Whether it is on.
    """
    if tp_mesh.device_type == "cpu":
        warnings.warn(
            "asynchronous tensor parallelism needs devices that reach each other's memory, which CPUs are not; "
            "training goes on without it",
            stacklevel=2,
        )
        return False
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch may have made the call needless; it does no harm
            enable_symm_mem_for_group(tp_mesh.get_group().group_name)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        warnings.warn(
            f"asynchronous tensor parallelism is off, since the ranks cannot share memory: {error}", stacklevel=2
        )
        return False
    inductor._micro_pipeline_tp = True
    return True
