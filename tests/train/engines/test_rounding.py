"""What is rounded, and when, in half precision: as a plain loop that rounds the same sums, to the last digits."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp.train.engines.trained import build_optimizer, token_losses
from tests.conftest import RunRanks
from tests.train.engines.runs import DECODER, job_of, plain_model, some_feed, train_here

RANKS = 2
UNITS = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
BUCKETS = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
FSDP2 = {"use_torch_fsdp2": True}
BF16 = {"bf16": True}
FP16 = {"fp16": True, "initial_loss_scale": 256.0}
SENT_IN_BF16 = {"grad_reduce_in_bf16": True}


@dataclass
class Plain:
    """Losses, norms and the optimizer's weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train_rounding_alike(values: dict[str, Any], sent: torch.dtype) -> Plain:
    """Weights for compute are rounded from float32; each microbatch's gradient of each rank is rounded on its way."""
    job = job_of(values, RANKS)
    model = plain_model(job)
    if job.engine != "torch_fsdp2":  # weights of this package's engine begin in the dtype of compute
        model = model.to(job.dtype)
    main = copy.deepcopy(model).float()
    model = model.to(job.dtype)
    optimizer = build_optimizer(main, job.options.optimizer)
    feeds = [some_feed(job, rank) for rank in range(RANKS)]
    scale = job.options.training.initial_loss_scale if job.options.training.fp16 else 1.0
    found = Plain([], [], {})
    for step in range(job.train_iters):
        loss, sums = 0.0, [torch.zeros_like(parameter) for parameter in main.parameters()]
        for batch in (batch for feed in feeds for batch in feed.batches(step * job.batch.total)):
            part = (token_losses(model(batch.inputs), batch.targets) * batch.factors_per_sample(job.batch.total)).sum()
            gradients = torch.autograd.grad(part * RANKS * scale, list(model.parameters()))
            loss += part.item()
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient.to(sent).float() / RANKS
        for parameter, total in zip(main.parameters(), sums, strict=True):
            parameter.grad = total / scale
        found.norms.append(nn.utils.clip_grad_norm_(main.parameters(), job.options.optimizer.clip_grad).item())
        found.losses.append(loss)
        for group in optimizer.param_groups:
            group["lr"] = job.schedule.rate(step)
        optimizer.step()
        with torch.no_grad():
            for parameter, rounded in zip(main.parameters(), model.parameters(), strict=True):
                rounded.copy_(parameter)
    found.weights = {name: parameter.detach() for name, parameter in main.named_parameters()}
    return found


@pytest.mark.full(short=["values3-sent3"])
@pytest.mark.parametrize(
    ("values", "sent"),
    [
        ({**UNITS, **BF16}, torch.float32),
        ({**BUCKETS, **BF16}, torch.float32),
        ({**FSDP2, **BF16}, torch.float32),
        ({**UNITS, **FP16}, torch.float32),
        ({**FSDP2, **FP16}, torch.float32),
        ({**UNITS, **SENT_IN_BF16}, torch.bfloat16),
        ({**UNITS, "megatron_fsdp_grad_comm_dtype": torch.float16}, torch.float16),
    ],
)
def test_only_what_is_said_is_rounded(run_ranks: RunRanks, values: dict[str, Any], sent: torch.dtype) -> None:
    asked = {**DECODER, **values, "global_batch_size": 11, "untie_embeddings_and_output_weights": True}
    plain = train_rounding_alike(asked, sent)
    for found in run_ranks(RANKS, train_here, asked):
        torch.testing.assert_close(found.losses, plain.losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.norms, plain.norms, rtol=3e-6, atol=0)
        for name, value in plain.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=0, atol=5e-6)
