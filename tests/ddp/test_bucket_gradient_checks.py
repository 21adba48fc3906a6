"""With buckets the checks of gradients name the bucket too, on every rank, and training goes on."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, errors, fully_shard_optimizer
from tests.support.api_net import backward, batches, build, largest_difference, train, weights
from tests.support.on_ranks import on_ranks, refusal

HISTORY = 10


@pytest.mark.full(cover=1)
@pytest.mark.parametrize(("factor", "error"), [(1e4, "LargeGradientError"), (float("nan"), "NonFiniteGradientError")])
@pytest.mark.parametrize(
    "fields",
    [{}, {"use_distributed_optimizer": True, "overlap_param_gather": True}, {"delay_wgrad_compute": True}],
    ids=["replicated", "distributed optimizer", "delayed"],
)
@on_ranks(2)
def test_messages_name_bucket_parameter_and_rank(factor: float, error: str, fields: dict[str, Any]) -> None:
    """Rank 1 spoils one layer; training goes on as in one process that never saw it."""
    net = build()
    config = DistributedDataParallelConfig(
        bucket_size=30, check_for_large_grads=True, check_for_nan_in_grad=True, overlap_grad_reduce=True, **fields
    )
    model = DistributedDataParallel(config, net)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    train(model, optimizer, HISTORY)

    def spoil(_module: Any, _args: Any, output: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            output.register_hook(lambda grad: grad * factor)
        return output

    handle = net.layers[1].linear.register_forward_hook(spoil)  # type: ignore[union-attr, operator]
    message = refusal(backward, model, next(batches(1, HISTORY)), error=getattr(errors, error))
    handle.remove()
    optimizer.zero_grad()
    train(model, optimizer, 2, first=HISTORY)
    reference = build()
    train(reference, torch.optim.SGD(reference.parameters(), lr=1e-2), HISTORY + 2)
    assert largest_difference(weights(model), weights(reference)) <= 2e-6
    assert message.startswith("the gradients of 4 parameters ")
    assert "layers.1.linear.weight (bucket 3) on rank [1]" in message
    assert "layers.0.linear.bias (bucket 2) on rank [1]" in message
    assert "head." not in message
