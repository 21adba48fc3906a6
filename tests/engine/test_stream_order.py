"""Gradients on a device with streams: what is shown, changed or added by hand is not met by a lane after it is gone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid_arguments
from tests.support.late_streams import late_lanes
from tests.support.tower import FEATURES, Floor, Tower, tower_loss

PRECISIONS = {
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "default policy": (torch.bfloat16, MixedPrecisionPolicy()),
    "main gradients alone in fp32": (
        torch.bfloat16,
        MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=torch.float32),
    ),
}


def plain(model: MegatronFSDP, x: Tensor) -> None:
    tower_loss(model, x).backward()


def replaced(model: MegatronFSDP, x: Tensor) -> None:
    tower_loss(model, x).backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 0.5


def penalty(model: MegatronFSDP) -> Tensor:
    return 1e-3 * torch.stack([param.square().sum() for param in model.parameters()]).sum()


def penalised(model: MegatronFSDP, x: Tensor) -> None:
    loss = tower_loss(model, x)
    (loss + penalty(model)).backward()


def penalised_last(model: MegatronFSDP, x: Tensor) -> None:
    """Autograd goes backwards, so this penalty's gradients come when all units are being reduced."""
    first = penalty(model)
    (first + tower_loss(model, x)).backward()


def train(way: Callable[[MegatronFSDP, Tensor], None], precision: str, hybrid: bool) -> list[Tensor]:
    """This rank's gradients and weights after two steps of two backwards each."""
    dtype, policy = PRECISIONS[precision]
    torch.manual_seed(0)
    net = Tower((8, 8)).to(dtype)
    model, optimizer = fully_shard(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        fsdp_unit_modules=[Floor],
        mixed_precision_policy=policy,
        **(hybrid_arguments(2, 1) if hybrid else {}),
    )
    draws = torch.Generator().manual_seed(torch.distributed.get_rank())
    found = []
    for _ in range(2):
        for _ in range(2):
            way(model, torch.randn(4, FEATURES, generator=draws).to(dtype))
        found += [param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [param.detach().to_local().clone() for param in model.parameters()]


def late_as_on_the_host(way: Callable[[MegatronFSDP, Tensor], None], hybrid: bool) -> dict[str, bool]:
    same = {}
    for precision in PRECISIONS:
        on_host = train(way, precision, hybrid)
        with late_lanes():
            late = train(way, precision, hybrid)
        same[precision] = len(late) == len(on_host) and all(map(torch.equal, late, on_host))
    return same


@pytest.mark.full(short=["replaced-False", "penalised_last-True"])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("way", [plain, replaced, penalised, penalised_last])
def test_gradients_are_those_of_the_host_on_the_laziest_streams(
    run_ranks: RunRanks, way: Callable[[MegatronFSDP, Tensor], None], hybrid: bool
) -> None:
    for same in run_ranks(2 if hybrid else 1, late_as_on_the_host, way, hybrid):
        assert same == dict.fromkeys(PRECISIONS, True)
