"""What travels and how it is added: the dtype changed between steps, and sums in float32 on every back end."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
)
from megatron_fsdp.comm import collectives
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.precision import ResolvedPrecision
from megatron_fsdp.engine.gradients import GradientReducer
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.placement import GradientReduction
from tests.conftest import RunRanks
from tests.engine.test_precision_emulation import BF16, CASES, FP16, FP32, FP64, Job, assert_emulated, train
from tests.support.api_net import Layer, batches, build, gradients, mesh, run_batch, wrap
from tests.support.case import Recording
from tests.support.counting import OpCounts
from tests.support.on_ranks import assert_equal_tensors, on_ranks, refusal

pytestmark = pytest.mark.unmerged

SWITCH = "reduce_scatter_with_fp32_accumulation"
ALL_BF16 = MixedPrecisionPolicy(FP32, FP32, BF16)


# ---- sums in float32 -----------------------------------------------------------------------------------------------


class _AsIfNotGloo:
    """torch.distributed as the collectives see it, but for the name of the back end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self, _group: dist.ProcessGroup) -> str:
        return "another"


@contextmanager
def another_back_end() -> Iterator[OpCounts]:
    """The path of back ends whose own reduce-scatter is fine; gloo's, used here, adds in the dtype that travels."""
    with mock.patch.object(collectives, "dist", _AsIfNotGloo()), OpCounts() as counts:
        yield counts


def train_elsewhere(jobs: Sequence[Job]) -> tuple[list[Recording], set[str]]:
    with another_back_end() as counts:
        recordings = train(jobs)
    return recordings, {each.name for each in counts.sent if "alltoall" in each.name or "reduce_scatter" in each.name}


def jobs_with(switch: bool) -> list[Job]:
    return [Job(CASES[BF16], ALL_BF16, strategy, steps=1, options=((SWITCH, switch),)) for strategy in (1, 2, 3)]


def test_the_switch_adds_in_float32_where_the_back_end_would_round_at_every_hop(run_ranks: RunRanks) -> None:
    with_switch = run_ranks(4, train_elsewhere, jobs_with(True))
    assert_emulated(4, jobs_with(True), [outcomes for outcomes, _ in with_switch])
    without = run_ranks(4, train_elsewhere, jobs_with(False))
    with pytest.raises(AssertionError, match=r"note 0 \(gradients\)"):
        assert_emulated(4, jobs_with(False), [outcomes for outcomes, _ in without])
    assert [names for _, names in with_switch] == [{"alltoall_base_"}] * 4
    assert [names for _, names in without] == [{"_reduce_scatter_base_"}] * 4


def switched(where: str, strategy: int = 3, policy: MixedPrecisionPolicy = ALL_BF16) -> MegatronFSDP:
    """A model with the switch on, given in one of the places that take it."""
    arguments: dict[str, Any] = {"fsdp_unit_modules": [Layer], "mixed_precision_policy": policy}
    if where in ("config", "class"):
        config = DistributedDataParallelConfig(
            data_parallel_sharding_strategy=ShardingStrategy(strategy).name,
            reduce_scatter_with_fp32_accumulation=where == "config",
        )
        if where == "class":
            arguments[SWITCH] = True
        return MegatronFSDP(build(), FSDPDistributedIndex(mesh(), "dp"), config, **arguments)
    arguments |= {"device_mesh": mesh(), "zero_dp_strategy": strategy, SWITCH: True}
    net = build()
    if where == "fully_shard_model":
        return fully_shard_model(net, **arguments)
    return fully_shard(net, torch.optim.SGD(net.parameters(), lr=0.1), **arguments)[0]


PLACES = ("config", "class", "fully_shard_model", "fully_shard")


REFUSED = (
    f"{SWITCH}=True needs a reduce-scatter, but zero_dp_strategy=0 (no_shard) reduces by an all-reduce; "
    "use strategy 1, 2 or 3, or set it to False and grad_comm_dtype=torch.float32"
)


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks()
def test_where_the_switch_cannot_take_effect_it_says_so_alike_on_every_rank(num_ranks: int) -> None:
    for where in PLACES:
        assert refusal(switched, where, strategy=0, error=ConfigurationError) == REFUSED
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        switched("class", policy=MixedPrecisionPolicy())
        switched("fully_shard", policy=MixedPrecisionPolicy(grad_comm_dtype=FP64))
        switched("config", policy=MixedPrecisionPolicy(grad_comm_dtype=FP16))
    assert [str(warning.message) for warning in caught if SWITCH in str(warning.message)] == [
        f"{SWITCH}=True changes no sum here, since gradients are communicated in {dtype} and are added in it; set "
        "grad_comm_dtype=torch.bfloat16 to halve what is sent, or leave the switch out"
        for dtype in ("torch.float32", "torch.float64")
        if num_ranks > 1 and dist.get_rank() == 0  # a single rank adds nothing up; the first says it for all
    ]


# ---- another dtype from one step to the next -----------------------------------------------------------------------


def bytes_of_step(model: MegatronFSDP) -> tuple[int, int]:
    """Reductions and the bytes that one backward sends in them."""
    before = model.traffic()
    run_batch(model, 0)
    model.zero_grad()
    sent = model.traffic().since(before)
    return sent.reductions, sent.reduce_bytes


def travelling_in(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(grad_comm_dtype=dtype)


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_bytes_on_the_wire_follow_the_communication_dtype_at_once(strategy: int) -> None:
    model = wrap(strategy)
    reductions, in_fp32 = bytes_of_step(model)
    assert reductions == 3
    assert in_fp32 > 0
    for dtype, factor in ((BF16, 0.5), (FP64, 2), (FP16, 0.5), (FP32, 1), (None, 1)):
        model.reset_mixed_precision_policy(travelling_in(dtype))
        assert bytes_of_step(model) == (reductions, int(in_fp32 * factor))
    with model.mixed_precision_context(travelling_in(BF16)):
        assert bytes_of_step(model)[1] == in_fp32 // 2
    assert bytes_of_step(model)[1] == in_fp32


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(3)
def test_after_a_change_gradients_are_those_of_a_model_wrapped_so(strategy: int) -> None:
    """Bit for bit, so no bucket, view or factor of the earlier dtype is left."""

    def gradients_of_batch(model: MegatronFSDP) -> dict[str, torch.Tensor]:
        run_batch(model, 0)
        found = gradients(model)
        model.zero_grad()
        return found

    model, found = wrap(strategy), {}
    for dtype in (None, BF16, FP64, FP16, None):
        model.reset_mixed_precision_policy(travelling_in(dtype))
        found[dtype] = gradients_of_batch(model)
        wrapped_so = wrap(strategy, mixed_precision_policy=travelling_in(dtype))
        assert_equal_tensors(found[dtype], gradients_of_batch(wrapped_so))
    assert not all(torch.equal(found[None][name], found[BF16][name]) for name in found[None])


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_what_cannot_change_is_refused_in_words_alike_on_every_rank(strategy: int) -> None:
    model = wrap(strategy)

    def refuse(policy: MixedPrecisionPolicy, words: str) -> None:
        with pytest.raises(ConfigurationError, match=words):
            model.reset_mixed_precision_policy(policy)

    refuse(MixedPrecisionPolicy(main_params_dtype=BF16), "only grad_comm_dtype can change after wrapping")
    refuse(MixedPrecisionPolicy(main_grads_dtype=BF16), "only grad_comm_dtype can change after wrapping")
    busy = "^grad_comm_dtype cannot change while gradients are on their way; call finish_grad_sync first$"
    with model.no_sync():
        run_batch(model, 0)
    refuse(travelling_in(BF16), busy)
    model.finish_grad_sync()
    inputs = next(batches(1))[0].requires_grad_()
    inputs.register_hook(lambda _grad: refuse(travelling_in(BF16), busy))
    model(inputs[:4]).sum().backward()
    model.reset_mixed_precision_policy(travelling_in(BF16))


@pytest.mark.parametrize("own", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.125, 2.0**-14, 2.0**-25, 1 / 3])
def test_what_a_hook_writes_by_itself_has_the_bits_of_the_encoded_gradient(
    factor: float, own: torch.dtype, sent: torch.dtype
) -> None:
    """Numbers of all magnitudes, subnormal ones too; no hook writes where two roundings would differ from one."""
    exponents = torch.arange(-24, 12, dtype=torch.float64).exp2()
    grad = (torch.randn(64, 36, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * exponents).to(own)
    reducer = object.__new__(GradientReducer)
    precision = ResolvedPrecision(own, own, own, sent, has_main_copy=False)
    plan: Any = SimpleNamespace(reduction=GradientReduction("sum", factor, 1.0), precision=precision)
    reducer.change_format(plan)
    wanted, target = torch.empty(64, 36, dtype=sent), torch.empty(64, 36, dtype=sent)
    reducer.encode(grad, wanted)
    (put,) = reducer.direct_encoders([target])
    is_exact = factor != 1 / 3 and (own != torch.float16 or factor > 2.0**-25)  # which is 0 in float16
    narrows = torch.promote_types(own, sent) == own
    assert (put is not None) == (factor == 1.0 or (is_exact and narrows))
    if put is not None:
        put(grad)
        assert torch.equal(target, wanted)
