"""The options about ranks: how many of each kind, on what, and which engine shards; Megatron-LM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ParallelOptions:
    """Ranks and engines, beside what `DistributedDataParallelConfig` says.

    Attributes:
        tensor_model_parallel_size: Ranks that each matrix is cut over.
        pipeline_model_parallel_size: Ranks that the layers are shared out to.
        context_parallel_size: Ranks that each sequence is cut over.
        expert_model_parallel_size: Ranks that the experts are shared out to.
        sequence_parallel: Cut activations between layers along the sequence, over the tensor-parallel ranks.
        use_torch_fsdp2: Shard by PyTorch's FSDP2 in place of this package's engine.
        torch_fsdp2_no_reshard_after_forward: Keep weights gathered from forward to backward, with FSDP2: more memory,
            fewer gathers.
        init_model_with_meta_device: Build the model without memory, and initialise shard by shard.
        device: Where to run; auto is the accelerator if there is one.
        nproc: Processes to start where torchrun did not start this one; default: one per accelerator, or two on a CPU.
        distributed_backend: Of the process group; auto fits the device.
        distributed_timeout_minutes: How long a collective may take.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False
    use_torch_fsdp2: bool = False
    torch_fsdp2_no_reshard_after_forward: bool = False
    init_model_with_meta_device: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nproc: int | None = None
    distributed_backend: Literal["auto", "nccl", "gloo"] = "auto"
    distributed_timeout_minutes: float = 10.0
