"""What a model costs to compute, in floating point operations, counted once on the meta device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.experts_stand_in import balanced_experts
from megatron_fsdp.plan.models import build_from_config
from megatron_fsdp.train.models.build import model_shape
from megatron_fsdp.train.models.decoder import Decoder
from megatron_fsdp.train.models.transformers_config import transformers_config
from megatron_fsdp.train.options.checks import uses_transformers
from megatron_fsdp.train.options.job import Job


def sample_flops(model: nn.Module, length: int) -> int:
    """Count the operations of matrix products and attention in forward, loss and backward of one sample.

    A multiply-add is two; causal attention counts as if every position saw every other, and nothing that is
    recomputed counts, as in "model FLOPs utilization" (Chowdhery et al. 2022, PaLM, appendix B). Attention is counted
    as its plain products, whichever kernel the run uses.

    Args:
        model: On the meta device, in training, with all its weights; takes token ids [1, length] and returns logits
            [1, length, vocabulary], or an object that has them as `logits`.
        length: Tokens of a sample.
    """
    tokens = torch.zeros((1, length), dtype=torch.int64, device="meta")
    grouped = {torch.ops.aten._grouped_mm: _grouped_flops}  # torch's counter has no formula for products of experts
    with FlopCounterMode(display=False, custom_mapping=grouped) as counter, sdpa_kernel(SDPBackend.MATH):
        result: Any = model(tokens)
        logits: Tensor = getattr(result, "logits", result)
        functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    return int(counter.get_total_flops())


def model_flops(job: Job, vocab_size: int) -> float:
    """Return what a sample of a run costs; NaN for a model that cannot be computed without values.

    Experts count as if every one got as many tokens as any other, and no token more experts than its router chooses.

    Args:
        job: The run.
        vocab_size: Token ids of the data.
    """
    if not uses_transformers(job.options.model):
        with torch.device("meta"):
            return float(sample_flops(Decoder(model_shape(job.options.model, vocab_size)), job.seq_length))
    config = transformers_config(job.options.model, vocab_size)
    model = build_from_config(config, torch.bfloat16).to(torch.bfloat16)  # what grouped products take on meta
    try:
        with balanced_experts(model):
            return float(sample_flops(model, job.seq_length))
    except (RuntimeError, NotImplementedError, ConfigurationError):  # its forward asks for values
        return math.nan


def _grouped_flops(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Operations of rows by the matrices of their experts, or of the gradients of these; by shapes."""
    return 2 * left[-2] * left[-1] * right[-1]
