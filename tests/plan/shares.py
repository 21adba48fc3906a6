"""What tests of shares have in common: small models on the meta device, one rank's profile, live bytes of a step."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from megatron_fsdp.plan.compute_profile import ComputeProfile
from megatron_fsdp.plan.planned_model import plan_model
from megatron_fsdp.plan.planning import profile_workload
from megatron_fsdp.plan.recompute import Recompute
from megatron_fsdp.plan.setup import Backend, ParallelRanks, Setup
from megatron_fsdp.plan.share import share_of_rank
from megatron_fsdp.plan.workload import Workload
from tests.automodel.small_models import config_of
from tests.support.live_bytes import LiveBytes

ROWS, SEQUENCE = 2, 64
WIDER: Mapping[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}


def without_memory(kind: str, **changes: Any) -> Any:
    """A small model on the meta device, in float32 and training mode."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **changes), dtype=torch.float32)
    model.tie_weights()
    return model.train()


def share(model: nn.Module, stage: int = 0, rows: int = ROWS, sequence: int = SEQUENCE, **sizes: int) -> Workload:
    """One rank's share on these axes."""
    return share_of_rank("model", model, ParallelRanks(**{"dp_shard": 1, **sizes}), rows, sequence, None, stage)


def profile(workload: Workload, backend: Backend, recompute: Recompute = "none", **sizes: int) -> ComputeProfile:
    """What it computes and keeps."""
    setup = Setup(ParallelRanks(**{"dp_shard": 1, **sizes}), backend=backend, recompute=recompute)
    return profile_workload(workload, plan_model(workload.module, setup))


def bytes_of_step(model: nn.Module, **inputs: Any) -> tuple[int, int]:
    """Bytes that a real forward leaves for backward, and the peak of both; gradients die as they arrive.

    The least of three: a thread of the back end may let go of what a collective has sent a moment too late.
    """
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_drop)
    found = []
    for _ in range(3):
        with LiveBytes() as live:
            loss = model(**inputs, use_cache=False).loss
            kept = live.now_bytes
            loss.backward()
            del loss
        found.append((kept, live.peak_bytes))
    return min(kept for kept, _ in found), min(peak for _, peak in found)


def _drop(param: torch.Tensor) -> None:
    param.grad = None
