"""A simulated rank holds, takes and sends exactly what the same rank of a real job does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, MegatronFSDP, fully_shard
from megatron_fsdp.comm.collectives import real_values
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.plan.simulate import simulated_model, simulated_ranks
from tests.conftest import RunRanks
from tests.support.formulas import footprints_of
from tests.support.on_ranks import fixed_seed, on_ranks
from tests.support.zoo import MODEL_CASES, TOWER_FEATURES, ModelName, Tower, tower_loss

_BF16_COMPUTE = MixedPrecisionPolicy(main_params_dtype=torch.float32, grad_comm_dtype=torch.bfloat16)


@dataclass(frozen=True)
class Job:
    """What to train, on which ranks, how."""

    name: ModelName
    sizes: Mapping[str, int]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    ddp: DistributedDataParallelConfig | None = None
    adam: bool = True

    @property
    def num_ranks(self) -> int:
        return int(torch.tensor(list(self.sizes.values())).prod())


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, lr=0.01) if job.adam else torch.optim.SGD(params, lr=0.01, momentum=0.9)


def _wrap(job: Job, mesh: DeviceMesh) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    case = MODEL_CASES[job.name]
    with fixed_seed(0):
        module = case.build()
    if job.ddp is not None:
        model = DistributedDataParallel(job.ddp, module, mesh, **job.arguments)
        return model, _optimizer(job, model)
    given: dict[str, Any] = {"dp_shard_dim": list(job.sizes)[-1], **job.arguments}
    if "dp_outer_dim" in given:
        with real_values():
            given["hybrid_fsdp_group"] = mesh[tuple(job.sizes)]._flatten("all_of_job").get_group()
    return fully_shard(module, _optimizer(job, module), mesh, fsdp_unit_modules=list(case.unit_classes), **given)


def _facts(job: Job, mesh: DeviceMesh) -> list[Any]:
    """What a rank holds and has sent after wrapping and after each of two steps, and its optimizer state."""
    case = MODEL_CASES[job.name]
    model, optimizer = _wrap(job, mesh)
    facts: list[Any] = [footprints_of(model), model.memory()]
    with fixed_seed(1):
        batch = case.make_batch(4, torch.Generator().manual_seed(0))
    for _ in range(2):
        case.loss(model, batch).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        facts += [model.memory(), model.traffic(), model.traffic_by_axis()]
    local = [local_tensor(param) for group in model.parameter_groups() for param in group.sharded]
    state = [
        (key, tuple(value.shape), str(value.dtype))
        for param in (param for group in optimizer.param_groups for param in group["params"])
        for key, value in optimizer.state[param].items()
        if isinstance(value, torch.Tensor)
    ]
    return [*facts, [(tuple(tensor.shape), str(tensor.dtype)) for tensor in local], state]


def _facts_of_real_rank(job: Job) -> list[Any]:
    return _facts(job, init_device_mesh("cpu", tuple(job.sizes.values()), mesh_dim_names=tuple(job.sizes)))


_HYBRID = {"outer": 2, "inner": 2}
_JOBS = {
    "strategy 2": Job("odd_shapes", {"dp": 3}, {"zero_dp_strategy": 2}, adam=False),
    "partly frozen": Job("partly_frozen", {"dp": 4}, {"average_in_collective": True}),
    "bf16": Job("bf16_fp32_norm", {"dp": 2}, {"mixed_precision_policy": _BF16_COMPUTE}),
    "HFSDP": Job("transformer", _HYBRID, {"dp_outer_dim": "outer", "outer_dp_sharding_strategy": 1}),
    "buckets": Job("unused", {"dp": 2}, ddp=DistributedDataParallelConfig(overlap_grad_reduce=True)),
    "sharded buckets": Job(
        "transformer",
        {"dp": 4},
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=500
        ),
    ),
}


@pytest.mark.full(short=["buckets"])
@pytest.mark.parametrize("job", _JOBS.values(), ids=_JOBS.keys())
def test_simulated_rank_equals_a_real_one(job: Job, run_ranks: RunRanks) -> None:
    for rank, real in enumerate(run_ranks(job.num_ranks, _facts_of_real_rank, job)):
        if rank in (0, job.num_ranks - 1):
            with simulated_ranks(job.sizes, rank=rank) as mesh:
                assert _facts(job, mesh) == real


def test_everything_is_put_back() -> None:
    """A real model works after a simulated one, and after one that failed."""

    def fails() -> nn.Module:
        raise KeyError("no such model")

    with pytest.raises(KeyError, match="no such model"), simulated_model(fails, num_ranks=2):
        pass
    x = torch.ones(2, TOWER_FEATURES)
    with simulated_model(Tower, num_ranks=2, build_optimizer=torch.optim.AdamW) as simulated:
        assert simulated.optimizer is not None
        tower_loss(simulated.model, x).backward()
        simulated.optimizer.step()
    assert not dist.is_initialized()
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters())
    tower_loss(model, x).backward()
    optimizer.step()
    assert bool(torch.isfinite(model.first.weight).all())


@on_ranks(2)
def test_refused_where_there_are_process_groups() -> None:
    with pytest.raises(ConfigurationError, match="has process groups already"), simulated_model(Tower, num_ranks=2):
        pass


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_ranks": 0}, "at least one rank"),
        ({"num_ranks": 4, "rank": 4}, "give 0 to 3"),
        ({"num_ranks": 4, "device_mesh": object()}, "give the sizes of its dimensions as num_ranks"),
        ({"num_ranks": 4, "device": "cpu"}, "no effect on tensors without memory"),
        ({"num_ranks": 4, "verify_ranks": True}, "there is only one"),
        ({"num_ranks": {"o": 2}, "dp_outer_dim": "o"}, "leave none to shard over"),
        ({"num_ranks": {"o": 2, "i": 2}, "dp_outer_dim": "x"}, "'x' is not one of the dimensions"),
    ],
)
def test_refusals(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told), simulated_model(Tower, **arguments):
        pass
    assert not dist.is_initialized()
