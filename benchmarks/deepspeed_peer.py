"""DeepSpeed's ZeRO, stages 1 to 3, in the process group that is there already."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import Contender, Setting, make_optimizer
from benchmarks.workloads import Microbatch, loss_of
from megatron_fsdp.errors import ConfigurationError

_NEVER = 10**9
_ALIGNMENT = 2
"""Elements of which a rank's part of a bucket has to be a multiple."""


@dataclass(frozen=True)
class DeepSpeedContender(Contender):
    """DeepSpeed's engine drives backward and the optimizer, and counts microbatches itself."""

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """As `Contender.step`; the engine divides the loss by the number of microbatches and clears gradients."""
        engine: Any = self.model
        losses = []
        for batch in microbatches:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()


def build_deepspeed(name: str, model: nn.Module, setting: Setting) -> Contender:
    """Build one stage with the same AdamW; buckets have the common size, all else is default; collective.

    Its shared-memory collectives for ranks of one machine are left out: they are compiled at run time.

    Raises:
        ConfigurationError: The weights are not float32: it would keep main weights that nobody else has.
    """
    if setting.dtype != torch.float32:
        raise ConfigurationError(f"{name} is compared with float32 weights only, and these are {setting.dtype}")
    os.environ.setdefault("DS_ACCELERATOR", setting.device.type)
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank())}
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__ = {}
    unit = _ALIGNMENT * dist.get_world_size()
    numel = -(-setting.bucket_numel // unit) * unit
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.workload.samples,
        "gradient_accumulation_steps": setting.microbatches,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": _NEVER,
        "gradient_clipping": 0.0,  # by default it clips at 1, and nobody else clips
        "zero_optimization": {
            "stage": int(name.removeprefix("deepspeed-")),
            "reduce_bucket_size": numel,
            "allgather_bucket_size": numel,
        },
    }
    if setting.narrow_dtype is not None:
        config["communication_data_type"] = str(setting.narrow_dtype).removeprefix("torch.").replace("bfloat16", "bf16")
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model, setting), config=config)
    return DeepSpeedContender(name, engine, optimizer)
