"""Full tensors one after another: values, order, memory and collectives."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.live_bytes import LiveBytes
from tests.support.models import MODEL_CASES, ModelName
from tests.support.op_counts import OpCounts
from tests.support.parity import assert_equal_tensors, fixed_seed

STRATEGIES = [0, 1, 2, 3]
SIZES_BYTES = [1, 800, 2**28]
"""From one tensor at a time to whole groups."""


def wrap(
    name: ModelName, strategy: int, policy: MixedPrecisionPolicy | None = None
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """A model that has been trained for a step, with gradients of the next one."""
    case = MODEL_CASES[name]
    with fixed_seed(0):
        model = case.build()
    model, optimizer = fully_shard(
        model,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        fsdp_unit_modules=list(case.unit_classes),
        zero_dp_strategy=strategy,
        mixed_precision_policy=policy or MixedPrecisionPolicy(),
    )
    for seed in range(2):
        batch = case.make_batch(12, torch.Generator().manual_seed(seed)).part(dist.get_rank(), dist.get_world_size())
        case.loss(model, batch).backward()
        if seed == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def everything(name: ModelName, strategy: int) -> dict[int, list[dict[str, Tensor]]]:
    """For each size: parameters, gradients and moments; kept as they come, so that a reused buffer would show."""
    model, optimizer = wrap(name, strategy)
    found = {}
    for size in SIZES_BYTES:
        parameters = list(model.iter_full_tensors(size))
        gradients = list(model.iter_full_tensors(size, "gradients"))
        state = list(model.iter_full_optimizer_state(optimizer, size))
        assert len(parameters) == len({n for n, _ in parameters}) == len(list(model.module.parameters()))
        found[size] = [dict(parameters), dict(gradients), {f"{n} {key}": value for n, key, value in state}]
    moments = {}
    for key in ("exp_avg", "exp_avg_sq"):
        for group in model.parameter_groups():
            for param in group.sharded:
                param.grad = optimizer.state[param][key] if param in optimizer.state else None
        moments.update({f"{n} {key}": g for n, g in model.full_gradients().items() if g is not None})
    found[0] = [model.full_parameters(), {}, moments]
    return found


@pytest.mark.full(short=["unused-2", "scalars-3", "tied-3"])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("odd_shapes", 0),
        ("scalars", 1),
        ("unused", 2),
        ("partly_frozen", 2),
        ("odd_shapes", 3),
        ("scalars", 3),
        ("tied", 3),
    ],
)
def test_tensors_are_those_of_the_model_whatever_the_bucket(
    run_ranks: RunRanks, name: ModelName, strategy: int
) -> None:
    for found in run_ranks(3, everything, name, strategy):
        parameters, _, moments = found.pop(0)
        gradients = found[SIZES_BYTES[-1]][1]
        assert gradients
        assert {label.split()[0] for label in moments} == set(gradients)
        for size in SIZES_BYTES:
            assert [list(tensors) for tensors in found[size]] == [list(t) for t in found[SIZES_BYTES[0]]]
            assert_equal_tensors(found[size][0], parameters)
            assert_equal_tensors(found[size][1], gradients)
            assert_equal_tensors(found[size][2], moments)


def gradients_by_hand(strategy: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float32)
    model, _ = wrap("odd_shapes", strategy, policy)
    return dict(model.iter_full_tensors(300, "gradients")), {
        name: grad for name, grad in model.full_gradients().items() if grad is not None
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_that_the_parameters_show(run_ranks: RunRanks, strategy: int) -> None:
    for streamed, whole in run_ranks(3, gradients_by_hand, strategy):
        assert_equal_tensors(streamed, whole)
        assert {grad.dtype for grad in streamed.values()} == {torch.float64}


# ---- memory and traffic --------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Nine square layers of 64 x 64 in one unit, 16 KiB each in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(8)])
        self.last = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


TENSOR_BYTES = 64 * 64 * 4


def peak_and_collectives(strategy: int, bucket_bytes: int) -> dict[str, Any]:
    model = nn.Sequential(Wide())
    wrapped, _ = fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        fsdp_unit_modules=[Wide],
        zero_dp_strategy=strategy,
    )
    with OpCounts(dist.get_world_size()) as counts, LiveBytes() as live:
        for _name, _tensor in wrapped.iter_full_tensors(bucket_bytes):
            pass
    found = counts.collectives
    return {
        "peak": live.peak_bytes,
        "gathers": found.gathers,
        "others": sorted(set(found.others)),
        "sent": len(found.others),
    }


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("strategy", [0, 1, 3])
@pytest.mark.parametrize("tensors", [1, 4, 8, 32])
def test_the_peak_is_what_was_allowed_and_collectives_are_batched(
    run_ranks: RunRanks, strategy: int, tensors: int
) -> None:
    """Two buckets are alive at a time, each of half the bytes or of one tensor; shards of 3 ranks cut the tensors."""
    for found in run_ranks(3, peak_and_collectives, strategy, tensors * TENSOR_BYTES):
        # gloo's thread may let go of the bucket before the last a moment after the wait for it has ended.
        late = max(tensors // 2, 1) * TENSOR_BYTES if strategy and tensors < 32 else 0
        assert found["peak"] <= max(tensors, 2) * TENSOR_BYTES + late + 3 * 512  # 512: padding of a shard, at most
        assert found["peak"] >= min(max(tensors, 2) - 1, 9) * TENSOR_BYTES // 2
        if strategy == 0:
            assert (found["gathers"], found["sent"]) == (0, 0)
        elif tensors == 32:
            assert (found["gathers"], found["sent"]) == (1, 0)
        else:
            buckets = -(-9 // max(tensors // 2, 1))
            assert found["gathers"] == 0
            assert found["others"] == ["broadcast_"]
            assert buckets <= found["sent"] <= buckets + 2


# ---- refusals ------------------------------------------------------------------------------------------------------


def refusals() -> list[str]:
    model, optimizer = wrap("odd_shapes", 3)
    messages = []

    def refuse(call: Any) -> None:
        with pytest.raises(ConfigurationError) as raised:
            call()
        messages.append(str(raised.value))

    refuse(lambda: model.iter_full_tensors(0))
    refuse(lambda: model.iter_full_tensors(what="weights"))  # type: ignore[arg-type]
    refuse(lambda: model.iter_full_optimizer_state(optimizer, -1))
    if dist.get_rank() == 1:
        model.module[0].wide.bias.grad = None  # type: ignore[index, union-attr]
    refuse(lambda: list(model.iter_full_tensors(what="gradients")))
    return messages


def test_what_means_nothing_or_would_hang_is_refused(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, refusals)
    assert first == second
    assert first[0].startswith("bucket_bytes=0 leaves no room")
    assert first[1] == "what='weights' is unknown; give 'parameters' or 'gradients'"
    assert first[2].startswith("bucket_bytes=-1 leaves no room")
    assert "ranks of the group disagree: rank 0 has '0.wide.bias in torch.float32', rank 1 has" in first[3]
