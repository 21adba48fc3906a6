"""What travels and how it is added: the dtype changed between steps, and sums in float32 on every back end."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
)
from megatron_fsdp.comm import axis as collectives
from megatron_fsdp.comm import axis as real_values
from megatron_fsdp.config.strategy import ShardingStrategy
from tests.conftest import RunRanks
from tests.support.api_net import Layer, backward, batches, build, mesh, message_of
from tests.support.precision_emulation import History, Job
from tests.support.precision_run import BF16, CASES, FP16, FP32, FP64, check_histories, train

SWITCH = "reduce_scatter_with_fp32_accumulation"
ALL_BF16 = MixedPrecisionPolicy(FP32, FP32, BF16)


# ---- sums in float32 -----------------------------------------------------------------------------------------------


class _AsIfNotGloo:
    """torch.distributed as the collectives see it, but for the name of the back end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self, _group: dist.ProcessGroup) -> str:
        return "another"


class _Reductions(TorchDispatchMode):
    """Names of the collectives that reduce-scatter, or could."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d" and ("alltoall" in name or "reduce_scatter" in name):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def another_back_end() -> Iterator[_Reductions]:
    """The path of back ends whose own reduce-scatter is fine; gloo's, used here, adds in the dtype that travels."""
    other = _AsIfNotGloo()
    with (
        mock.patch.object(collectives, "dist", other),
        mock.patch.object(real_values, "dist", other),
        _Reductions() as reductions,
    ):
        yield reductions


def train_elsewhere(jobs: Sequence[Job], switch: bool) -> tuple[list[tuple[History, list[str]]], set[str]]:
    with another_back_end() as reductions:
        return train(jobs, **{SWITCH: switch}), reductions.names


JOBS = [Job(CASES[BF16], ALL_BF16, strategy, steps=1) for strategy in (1, 2, 3)]


def test_the_switch_adds_in_float32_where_the_back_end_would_round_at_every_hop(run_ranks: RunRanks) -> None:
    with_switch = run_ranks(4, train_elsewhere, JOBS, True)
    check_histories(4, JOBS, [histories for histories, _ in with_switch])
    without = run_ranks(4, train_elsewhere, JOBS, False)
    with pytest.raises(AssertionError, match="gradients of step 0"):
        check_histories(4, JOBS, [histories for histories, _ in without])
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


def exchanges() -> dict[str, list[bool]]:
    with another_back_end():
        found = {
            where: [group.plan.axis.exchanges_pairwise for group in switched(where).parameter_groups()]
            for where in PLACES
        }
        plain = fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer])
        found["none"] = [group.plan.axis.exchanges_pairwise for group in plain.parameter_groups()]
    return found


def test_every_place_that_takes_the_switch_turns_it_on(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, exchanges):
        assert found == {**{where: [True] * 3 for where in PLACES}, "none": [False] * 3}


def messages() -> tuple[list[tuple[str, str]], list[str]]:
    """What is refused under strategy 0, and the warnings where nothing travels in 16 bits."""
    refused = []
    for where in PLACES:
        try:
            switched(where, strategy=0)
        except Exception as error:  # noqa: BLE001  # its class is compared
            refused.append(message_of(error))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        switched("class", policy=MixedPrecisionPolicy())
        switched("fully_shard", policy=MixedPrecisionPolicy(grad_comm_dtype=FP64))
        switched("config", policy=MixedPrecisionPolicy(grad_comm_dtype=FP16))
    return refused, [str(warning.message) for warning in caught if SWITCH in str(warning.message)]


REFUSED = (
    f"{SWITCH}=True needs a reduce-scatter, but zero_dp_strategy=0 (no_shard) reduces by an all-reduce; "
    "use strategy 1, 2 or 3, or set it to False and grad_comm_dtype=torch.float32"
)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_where_the_switch_cannot_take_effect_it_says_so_alike_on_every_rank(
    run_ranks: RunRanks, num_ranks: int
) -> None:
    for refused, warned in run_ranks(num_ranks, messages):
        assert refused == [("ConfigurationError", REFUSED)] * len(PLACES)
        assert warned == [
            f"{SWITCH}=True changes no sum here, since gradients travel in {dtype} and are added in it; set "
            "grad_comm_dtype=torch.bfloat16 to halve what is sent, or leave the switch out"
            for dtype in ("torch.float32", "torch.float64")
            if num_ranks > 1  # a single rank adds nothing up
        ]


# ---- another dtype from one step to the next -----------------------------------------------------------------------


def bytes_of_step(model: MegatronFSDP) -> tuple[int, int]:
    """Reductions and the bytes that one backward sends in them."""
    before = model.traffic()
    backward(model, next(batches(1)))
    model.zero_grad()
    sent = model.traffic().since(before)
    return sent.reductions, sent.reduce_bytes


def change_and_count(strategy: int) -> list[tuple[int, int]]:
    model = fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    counts = [bytes_of_step(model)]
    for dtype in (BF16, FP64, FP16, FP32, None):
        model.reset_mixed_precision_policy(MixedPrecisionPolicy(grad_comm_dtype=dtype))
        counts.append(bytes_of_step(model))
    with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=BF16)):
        counts.append(bytes_of_step(model))
    counts.append(bytes_of_step(model))
    return counts


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("strategy", range(4))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_bytes_on_the_wire_follow_the_communication_dtype_at_once(
    run_ranks: RunRanks, num_ranks: int, strategy: int
) -> None:
    for counts in run_ranks(num_ranks, change_and_count, strategy):
        reductions, in_fp32 = counts[0]
        assert reductions == 3
        assert in_fp32 > 0
        factors = (1, 0.5, 2, 0.5, 1, 1, 0.5, 1)
        assert counts == [(reductions, int(in_fp32 * factor)) for factor in factors]


def change_beside_main_dtypes(policy: MixedPrecisionPolicy) -> tuple[list[int], list[MixedPrecisionPolicy]]:
    """Bytes and policies before, inside and after a block, of a model whose main dtypes are not the default ones."""
    model = fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer], mixed_precision_policy=policy)
    counts, policies = [bytes_of_step(model)[1]], []
    for same in ({}, {"main_params_dtype": None}, {"main_grads_dtype": policy.main_grads_dtype}):
        with model.mixed_precision_context(MixedPrecisionPolicy(**same, grad_comm_dtype=BF16)):
            counts.append(bytes_of_step(model)[1])
            policies.append(model.mp_policy)
    counts.append(bytes_of_step(model)[1])
    return counts, [*policies, model.mp_policy]


@pytest.mark.parametrize(
    "policy", [MixedPrecisionPolicy(None, FP32), MixedPrecisionPolicy(FP64, FP64, FP32)], ids=["none", "double"]
)
def test_a_policy_that_names_no_main_dtypes_leaves_those_of_the_model(
    run_ranks: RunRanks, policy: MixedPrecisionPolicy
) -> None:
    inside = MixedPrecisionPolicy(policy.main_params_dtype, policy.main_grads_dtype, BF16)
    for counts, policies in run_ranks(2, change_beside_main_dtypes, policy):
        assert counts == [counts[0], *[counts[0] // 2] * 3, counts[0]]
        assert policies == [inside] * 3 + [policy]


def train_with_changes(changes: Sequence[torch.dtype | None], strategy: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of one and the same batch, each backward after another change."""
    model = fully_shard_model(
        build(),
        mesh(),
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=changes[0]),
    )
    found = []
    for dtype in changes:
        model.reset_mixed_precision_policy(MixedPrecisionPolicy(grad_comm_dtype=dtype))
        backward(model, next(batches(1)))
        found.append({name: grad.clone() for name, grad in model.full_gradients().items() if grad is not None})
        model.zero_grad()
    return found


CHANGES = (None, BF16, FP64, FP16, None)


@pytest.mark.full(short=["0", "3"])
@pytest.mark.parametrize("strategy", range(4))
def test_after_a_change_gradients_are_those_of_a_model_wrapped_so(run_ranks: RunRanks, strategy: int) -> None:
    """Bit for bit, so no bucket, view or factor of the earlier dtype is left."""
    changed = run_ranks(3, train_with_changes, CHANGES, strategy)[0]
    for position, dtype in enumerate(CHANGES):
        (fresh,) = run_ranks(3, train_with_changes, (dtype,), strategy)[0]
        assert fresh.keys() == changed[position].keys()
        assert all(torch.equal(changed[position][name], value) for name, value in fresh.items()), dtype
    assert not all(torch.equal(changed[0][name], changed[1][name]) for name in changed[0])


def sum_two_microbatches() -> float:
    """The gradient of a weight that a pattern names, after the communication dtype was set."""
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, param_name_patterns_for_fp32_local_accumulation=("all",)
    )
    model = DistributedDataParallel(config, nn.Linear(1, 1, bias=False, dtype=BF16))
    model.reset_mixed_precision_policy(MixedPrecisionPolicy(grad_comm_dtype=FP32))
    with model.no_sync():
        for gradient in (1.0, 2.0**-9):
            model(torch.full((1, 1), gradient, dtype=BF16)).sum().backward()
    model.finish_grad_sync()
    return float(model.full_gradients()["weight"])


def test_a_change_keeps_sums_in_float32_where_a_pattern_asks_for_them(run_ranks: RunRanks) -> None:
    assert run_ranks(1, sum_two_microbatches) == [1.0 + 2.0**-9]  # bfloat16 has 1.0 for it


def refusals(strategy: int) -> list[tuple[str, str]]:
    """Changes that cannot be made: of main dtypes, inside a backward, and over deferred gradients."""
    model = fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    found = []

    def attempt(change: Callable[[], None]) -> None:
        try:
            change()
        except Exception as error:  # noqa: BLE001  # its class is compared
            found.append(message_of(error))
        else:
            found.append(("", "accepted"))

    to_bf16 = MixedPrecisionPolicy(grad_comm_dtype=BF16)
    attempt(lambda: model.reset_mixed_precision_policy(MixedPrecisionPolicy(main_params_dtype=BF16)))
    attempt(lambda: model.reset_mixed_precision_policy(MixedPrecisionPolicy(main_grads_dtype=BF16)))
    with model.no_sync():
        backward(model, next(batches(1)))
    attempt(lambda: model.reset_mixed_precision_policy(to_bf16))
    model.finish_grad_sync()
    inside: list[tuple[str, str]] = []

    def in_backward(grad: torch.Tensor) -> torch.Tensor:
        try:
            model.reset_mixed_precision_policy(to_bf16)
        except Exception as error:  # noqa: BLE001  # its class is compared
            inside.append(message_of(error))
        return grad

    inputs = next(batches(1))[0].requires_grad_()
    output = model(inputs[:4])
    inputs.register_hook(in_backward)
    output.sum().backward()
    found += inside
    attempt(lambda: model.reset_mixed_precision_policy(to_bf16))
    return found


@pytest.mark.parametrize("strategy", range(4))
def test_what_cannot_change_is_refused_in_words_alike_on_every_rank(run_ranks: RunRanks, strategy: int) -> None:
    busy = "grad_comm_dtype cannot change while gradients are on their way; call finish_grad_sync first"
    by_rank = run_ranks(2, refusals, strategy)
    assert by_rank[0] == by_rank[1]
    params, grads, deferred, inside, after = by_rank[0]
    for kind, text in (params, grads):
        assert kind == "ConfigurationError"
        assert "only grad_comm_dtype can change after wrapping" in text
    assert deferred == inside == ("ConfigurationError", busy)
    assert after == ("", "accepted")


def fail_inside_the_context(strategy: int) -> tuple[str, str, list[int]]:
    """An error in a backward inside `mixed_precision_context`: what is raised, and the bytes after `reset`."""
    model = fully_shard_model(build(), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    before = bytes_of_step(model)[1]

    def explode(_grad: torch.Tensor) -> None:
        raise RuntimeError("in backward")

    inputs = next(batches(1))[0].requires_grad_()
    inputs.register_hook(explode)
    try:
        with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=BF16)):
            model(inputs[:4]).sum().backward()
    except Exception as error:  # noqa: BLE001  # its class is compared
        kind, text = message_of(error)
    model.reset()
    model.zero_grad()
    return kind, text, [before, bytes_of_step(model)[1]]


@pytest.mark.parametrize("strategy", range(4))
def test_an_error_inside_the_context_comes_out_and_the_dtype_is_restored(run_ranks: RunRanks, strategy: int) -> None:
    for kind, text, (before, after) in run_ranks(2, fail_inside_the_context, strategy):
        assert (kind, text) == ("RuntimeError", "in backward")
        assert after == before
