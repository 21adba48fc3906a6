"""Communication memory that is taken at wrap time: the same addresses and offsets in every step and on every rank."""

import gc
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy
from megatron_fsdp.comm.collectives import Axis
from megatron_fsdp.comm.registration import UserBuffers
from megatron_fsdp.engine.plans import Use
from megatron_fsdp.errors import ConfigurationError
from tests.support.arrangements import hybrid_arguments
from tests.support.case import shard
from tests.support.counting import LiveBytes, held_bytes
from tests.support.on_ranks import engine_of, first_rank_warns, fixed_seed, on_ranks, refusal, same_on_ranks
from tests.support.zoo import TOWER_FEATURES, Floor, Tower

pytestmark = pytest.mark.unmerged

MIXED = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
TAKEN = r"bytes of communication memory are taken once and keep their addresses, but nothing is registered, since"


def wrap(dtype: torch.dtype = torch.float32, **given: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """A model in which two units fit no slot of the others."""
    with warnings.catch_warnings(), fixed_seed(1):
        warnings.filterwarnings("ignore", "nccl_ub: .* nothing is registered")
        options = {"fsdp_unit_modules": [Floor], "nccl_ub": True, **given}
        return shard(Tower((16, 16, 40, 16, 24, 16)).to(dtype), **options)


def train(
    model: MegatronFSDP,
    optimizer: torch.optim.Optimizer,
    seed: int,
    dtype: torch.dtype = torch.float32,
    deferred: int = 0,
    more: int = 0,
) -> None:
    """One step: microbatches whose reduction is deferred, microbatches that are reduced, and a last one."""
    torch.manual_seed(17 * seed + dist.get_rank())
    for index in range(deferred + more + 1):
        with model.no_sync() if index < deferred else nullcontext():
            model(torch.randn(3, TOWER_FEATURES, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


CASES: dict[str, tuple[int, torch.dtype, dict[str, Any], dict[str, int]]] = {
    "zero-1": (2, torch.float32, {"zero_dp_strategy": 1}, {}),
    "accumulated-3": (2, torch.float32, {}, {"more": 2}),
    "deferred": (2, torch.float32, {}, {"deferred": 2}),
    "mixed": (2, torch.bfloat16, {"mixed_precision_policy": MIXED}, {}),
    "max pool": (2, torch.float32, {"maxpool_double_buffer": True}, {}),
    "hsdp": (4, torch.float32, {}, {"more": 1}),
    "hfsdp mixed": (4, torch.bfloat16, {"outer_dp_sharding_strategy": "optim", "mixed_precision_policy": MIXED}, {}),
}


Collective = tuple[str, tuple[int, ...], tuple[tuple[Use, int, int, int], ...]]
"""The method of the axis, addresses of its tensors, and where they lie in the pool: block, its number, offset, bytes.

What is a part of another tensor of the call, in place, has no place here: it lies elsewhere on each rank.
"""


@contextmanager
def recorded(model: MegatronFSDP) -> Iterator[list[Collective]]:
    """Record the collectives inside the block; each tensor has to lie inside of a block of the model's pool."""
    found: list[Collective] = []

    def recording(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(axis: Axis, *args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if axis.num_ranks > 1:
                whole = [each for each in tensors if not any(is_part(each, other) for other in tensors)]
                addresses = tuple(tensor.data_ptr() for tensor in tensors)
                found.append((name, addresses, tuple(place_of(model, each) for each in whole)))
            return real(axis, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_reduce", "reduce_scatter", "exchange"):
            patch.setattr(Axis, name, recording(name, getattr(Axis, name)))
        yield found


def assert_steps_alike(model: MegatronFSDP, step: Callable[[int], None]) -> None:
    """Assert that steps behind the first one have the same collectives, on the same memory, alike on all ranks."""
    traces = []
    for seed in range(4):
        with recorded(model) as trace:
            step(seed)
        traces.append(trace)
    assert len(traces[1]) >= 7
    assert traces[1] == traces[2] == traces[3]
    same_on_ranks([(name, places) for name, _, places in traces[1]])


def is_part(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.nbytes < other.nbytes and 0 <= tensor.data_ptr() - other.data_ptr() < other.nbytes


def place_of(model: MegatronFSDP, tensor: torch.Tensor) -> tuple[Use, int, int, int]:
    pool = engine_of(model).executor.pool
    assert pool.plan is not None
    for block in pool.plan.blocks:
        part = pool.memory_of(block.use, block.number)
        assert part is not None
        inside = tensor.data_ptr() - part.data_ptr()
        if 0 <= inside <= block.num_bytes - tensor.nbytes:
            return block.use, block.number, block.offset + inside, tensor.nbytes
    raise AssertionError(f"{tensor.nbytes} bytes lie in no block of the {pool.plan.num_bytes} bytes taken")


@pytest.mark.full(short=["zero-1", "deferred", "max pool", "hsdp", "hfsdp mixed"])
@pytest.mark.parametrize(("name", "num_ranks"), [pytest.param(name, CASES[name][0], id=name) for name in CASES])
@on_ranks()
def test_every_step_is_the_same_operations_on_the_same_registered_addresses(name: str, num_ranks: int) -> None:
    _, dtype, given, steps = CASES[name]
    if num_ranks == 4:
        given = {**hybrid_arguments(2, 2), **given}
    model, optimizer = wrap(dtype, **given)
    assert_steps_alike(model, lambda seed: train(model, optimizer, seed, dtype, **steps))


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_results_are_those_of_memory_that_comes_and_goes(strategy: int) -> None:
    found = []
    for nccl_ub in (True, False):
        model, optimizer = wrap(zero_dp_strategy=strategy, nccl_ub=nccl_ub)
        for seed in range(3):
            train(model, optimizer, seed)
        found.append([param.full_tensor() for param in model.parameters() if isinstance(param, DTensor)])
    assert len(found[0]) == 2 + 2 * 6
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_the_peak_is_held_from_the_start(strategy: int) -> None:
    """Blocks are borrowed from the pool alone: its plan is what exists after wrapping, in a step and after it."""
    before = held_bytes()
    model, optimizer = wrap(zero_dp_strategy=strategy)
    engine = engine_of(model)
    assert engine.memory_plan.pool is not None
    shards = sum(group.weights.compute.local.nbytes for group in engine.groups())
    wrapped = held_bytes() - before
    own = shards if strategy == 0 else 0  # of weights that no collective reads or writes
    assert engine.memory_plan.pool.num_bytes + own <= wrapped < engine.memory_plan.pool.num_bytes + own + 1024
    told = model.describe().memory
    train(model, optimizer, 0)
    assert model.describe().memory.transient_peak_bytes == told.transient_peak_bytes
    with LiveBytes() as live:
        train(model, optimizer, 1)
    assert live.now_bytes < live.peak_bytes
    assert held_bytes() - before < wrapped + 2048


@on_ranks(2)
def test_bytes_of_a_weight_format_arrive_where_they_are_decoded() -> None:
    """They need neither a gradient bucket nor another block: that is all `reuse_grad_buf_for_mxfp8_param_ag` asks."""
    sizes, sent = [], []
    for weight_format in (None, "mxfp8"):
        policy = replace(MIXED, weight_format=weight_format)
        model, optimizer = wrap(torch.bfloat16, mixed_precision_policy=policy)
        plan = engine_of(model).executor.pool.plan
        assert plan is not None
        sizes.append({(b.use, b.number): b.num_bytes for b in plan.blocks if b.use is not Use.SHARD})
        train(model, optimizer, 0, torch.bfloat16)
        with recorded(model) as trace:
            train(model, optimizer, 1, torch.bfloat16)
        gathers = [[use for use, *_ in places] for name, _, places in trace if name == "all_gather"]
        assert {use for uses in gathers for use in uses} == {Use.SHARD, Use.SLOT, Use.UNIT}
        sent.append(model.traffic().gather_bytes)
    assert sizes[0] == sizes[1]
    assert sent[1] < 0.6 * sent[0]


# ---- registration ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_back_end_that_cannot_register_is_said_once_and_told() -> None:
    with first_rank_warns(TAKEN + r" ranks communicate by gloo on cpu, and only NCCL registers memory"):
        model, _ = shard(Tower(), fsdp_unit_modules=[Floor], nccl_ub=True)
    (note,) = model.describe().notes
    assert "only NCCL registers memory" in note


class Backend:
    """Stands for NCCL's part in the registration."""

    def __init__(self, refuses: bool) -> None:
        self.calls: list[str] = []
        self.refuses = refuses

    def register_mem_pool(self, _pool: Any, symm: bool = False) -> None:
        """register_mem_pool(self, pool, symm=False)"""
        self.calls.append(f"symm={symm}")
        if self.refuses:
            raise RuntimeError("no window for you\nat some line")

    def deregister_mem_pool(self, _pool: Any) -> None:
        self.calls.append("deregistered")


@contextmanager
def as_if_with_nccl(backend: Backend) -> Iterator[None]:
    with (
        mock.patch("megatron_fsdp.comm.registration._unsupported_reason", return_value=""),
        mock.patch("megatron_fsdp.comm.registration._backend", return_value=backend),
        mock.patch.object(UserBuffers, "allocate", lambda _self, n: torch.zeros(n, dtype=torch.uint8)),
        mock.patch.object(dist, "barrier"),
    ):
        yield


@pytest.mark.parametrize("given", [{}, {"disable_symmetric_registration": True}])
@on_ranks(2)
def test_memory_is_registered_with_every_group_until_the_model_is_deleted(given: dict[str, Any]) -> None:
    backend = Backend(refuses=False)
    with as_if_with_nccl(backend):
        model, optimizer = wrap(**given)
        how = "conventionally" if given else "with symmetric windows"
        assert model.describe().notes[0].endswith(f"they are registered with NCCL {how}")
        assert backend.calls == [f"symm={not given}"]
        with pytest.raises(ConfigurationError, match="needs fsdp_manual_registration=True"):
            model.manual_buffer_registration()
        train(model, optimizer, 0)
        del model, optimizer
        gc.collect()
    assert backend.calls[1:] == ["deregistered"]


@on_ranks(2)
def test_a_refusal_of_the_library_stops_all_ranks_with_one_sentence() -> None:
    backend = Backend(refuses=dist.get_rank() == 1)
    with as_if_with_nccl(backend):
        assert re.search(r"NCCL refused to register .* memory \(no window for you\)", refusal(wrap))
