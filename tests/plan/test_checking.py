"""Plans against the real runtime, stepped with fake tensors as one rank of many: every figure is the same."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.plan.planning import plan
from tests.support.models import Block, TinyTransformer
from tests.support.simulated_plan import check_by_simulation
from tests.support.tower import FEATURES, Floor, Tower

WIDE = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)


def tower(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return Tower(hidden=(48, 32, 40, 32, 56)).to(dtype)


def odd() -> nn.Module:
    return TinyTransformer(layers=4, tied=True)


def _mean(output: torch.Tensor) -> torch.Tensor:
    return output.float().mean()


INPUTS: dict[Callable[[], nn.Module], Callable[[], torch.Tensor]] = {
    tower: lambda: torch.empty(6, FEATURES, dtype=torch.bfloat16, device="meta"),
    odd: lambda: torch.empty(3, 8, dtype=torch.long, device="meta"),
}


@pytest.mark.full(cover=1)
@pytest.mark.parametrize(
    ("strategy", "backend"), [(0, "gloo"), (1, "nccl"), (2, "gloo"), (3, "gloo"), (3, "nccl")], ids=str
)
@pytest.mark.parametrize(
    ("build", "ranks", "outer", "policy", "microbatches"),
    [
        (tower, {"dp_shard": 1}, 0, None, 1),
        (odd, {"dp_shard": 64}, 0, None, 1),
        (odd, {"dp_shard": 5}, 0, WIDE, 1),
        (tower, {"dp_shard": 8, "dp_outer": 4}, 0, WIDE, 2),
        (tower, {"dp_shard": 4, "dp_outer": 16}, 1, None, 2),
    ],
    ids=lambda value: value.__name__ if callable(value) else "wide" if value is WIDE else str(value),
)
def test_a_plan_is_what_the_engine_does(
    build: Callable[[], nn.Module],
    ranks: dict[str, int],
    outer: int,
    policy: MixedPrecisionPolicy | None,
    microbatches: int,
    strategy: int,
    backend: str,
) -> None:
    if strategy == 0 and outer == 1:
        pytest.skip("refused: nothing is shared out that could be shared out further")
    found = plan(
        build,
        ranks,
        strategy,
        outer_strategy=outer,
        policy=policy,
        backend=backend,
        microbatches=microbatches,
        optimizer="adamw-loop",
        inputs=INPUTS[build](),
        loss_fn=_mean,
        fsdp_unit_modules=[Floor] if build is tower else [Block],
    )
    checked = check_by_simulation(found, build)
    assert [each for each in checked if not each.agrees] == []
    names = {each.name for each in checked}
    assert {"compute weights", "optimizer", "dp_shard: bytes sent"} <= names
    assert ("dp_outer: bytes sent" in names) is ("dp_outer" in ranks)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_state_of_optimizers_is_what_torch_keeps(optimizer: str) -> None:
    found = plan(
        tower, 4, inputs=INPUTS[tower](), loss_fn=_mean, fsdp_unit_modules=[Floor], optimizer=optimizer, backend="gloo"
    )
    assert [each for each in check_by_simulation(found, tower) if not each.agrees] == []


def test_a_wrong_plan_is_told() -> None:
    found = plan(
        tower,
        4,
        inputs=INPUTS[tower](),
        loss_fn=_mean,
        fsdp_unit_modules=[Floor],
        optimizer="adamw-loop",
        backend="gloo",
    )
    checked = check_by_simulation(found, partial(Tower, hidden=(48, 32, 40, 32, 64)), steps=False)
    assert [each.name for each in checked if not each.agrees] == ["compute weights", "main weights", "main gradients"]
