"""What the planner says that this engine takes at its peak on one rank of a run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import Setting
from benchmarks.readings import Request
from benchmarks.workloads import build_model
from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.plan import plan


def planned_peak(request: Request, setting: Setting) -> int | None:
    """Bytes at the peak under strategy 3; None where shapes depend on values, or the planner refuses the model.

    Args:
        request: For ranks, microbatches and the device.
        setting: For the model and dtypes.
    """
    workload = setting.workload
    if workload.kind == "mixtral":
        return None
    model = build_model(workload, setting.dtype, torch.device("meta"))
    tokens = torch.empty(workload.samples, workload.tokens, dtype=torch.long, device="meta")
    found = plan(
        model,
        request.ranks,
        3,
        microbatches=request.microbatches,
        policy=MixedPrecisionPolicy(None, None, setting.narrow_dtype),
        optimizer="adamw-fused" if request.optimizer == "fused" else "adamw",
        backend="gloo" if setting.device.type == "cpu" else "nccl",
        inputs=tokens,
        loss_fn=_loss,
    )
    return found.memory.peak_bytes


def _loss(logits: Tensor) -> Tensor:
    """As `loss_of`, of any targets."""
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, torch.empty(flat.shape[0], dtype=torch.long, device=flat.device))
