"""With buckets the checks of gradients name the bucket too, on every rank, and training goes on."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, fully_shard_optimizer
from megatron_fsdp.errors import MegatronFSDPError
from tests.conftest import RunRanks
from tests.support.api_net import backward, batches, build, largest_difference, train, weights

HISTORY = 10


def report_and_go_on(factor: float, fields: dict[str, Any]) -> tuple[str, float]:
    """What a backward raises in which rank 1 spoils one layer, and the distance to one process that never saw it."""
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
    message = ""
    try:
        backward(model, next(batches(1, HISTORY)))
    except MegatronFSDPError as error:
        message = f"{type(error).__name__}: {error}"
    handle.remove()
    optimizer.zero_grad()
    train(model, optimizer, 2, first=HISTORY)
    reference = build()
    train(reference, torch.optim.SGD(reference.parameters(), lr=1e-2), HISTORY + 2)
    return message, largest_difference(weights(model), weights(reference))


@pytest.mark.full(cover=1)
@pytest.mark.parametrize(("factor", "error"), [(1e4, "LargeGradientError"), (float("nan"), "NonFiniteGradientError")])
@pytest.mark.parametrize(
    "fields",
    [{}, {"use_distributed_optimizer": True, "overlap_param_gather": True}, {"delay_wgrad_compute": True}],
    ids=["replicated", "distributed optimizer", "delayed"],
)
def test_messages_name_bucket_parameter_and_rank(
    run_ranks: RunRanks, factor: float, error: str, fields: dict[str, Any]
) -> None:
    outcomes = run_ranks(2, report_and_go_on, factor, fields)
    assert outcomes[0] == outcomes[1]
    message, difference = outcomes[0]
    assert message.startswith(f"{error}: the gradients of 4 parameters ")
    assert "layers.1.linear.weight (bucket 3) on rank [1]" in message
    assert "layers.0.linear.bias (bucket 2) on rank [1]" in message
    assert "head." not in message
    assert difference <= 2e-6
