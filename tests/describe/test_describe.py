"""Every field of a description against live facts; every option changes what is told."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp import fully_shard
from megatron_fsdp.comm.collectives import real_values
from megatron_fsdp.describe.description import Description
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.fully_shard import fully_shard_model
from megatron_fsdp.plan.simulate import built_without_memory, simulated_model, simulated_ranks
from tests.conftest import RunRanks
from tests.support.on_ranks import fixed_seed
from tests.support.zoo import FLOOR_NUMEL, MODEL_CASES, TOWER_FEATURES, Floor, Tower, tower_loss


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad])


def told(
    num_ranks: int | Mapping[str, int] = 4, rank: int = 1, steps: int = 0, build: Any = Tower, **arguments: Any
) -> Description:
    """What a simulated rank says."""
    arguments = {"fsdp_unit_modules": [Floor], **arguments}
    with simulated_model(build, num_ranks=num_ranks, rank=rank, build_optimizer=adam, **arguments) as simulated:
        for _ in range(steps):
            tower_loss(simulated.model, torch.zeros(2, TOWER_FEATURES)).backward()
            assert simulated.optimizer is not None
            simulated.optimizer.step()
        return simulated.model.describe()


GOLDEN = """\
wrapper MegatronFSDP, model Tower, rank 1, world_size 4, device cpu, strategy optim_grads_params,
unit_source given classes Floor, frozen_numel 0, numel 8,704
axis name dp, role shard, size 4, position 1, ranks 0 to 3, backend gloo
unit (root): Tower, 512 parameters
  group parameters 2, numel 512, padding_numel 0, shard_numel 128, is_trainable, tensor_parallel 0,
        storage float32, compute float32, gather float32, reduce float32, accumulate float32,
        main float32, optimizer_state float32, compute_weight Shard, main_gradient Shard,
        main_weight Shard, compute_bytes 512 B, main_bytes 0 B, gradient_bytes 512 B,
        padding_fraction 0.0000
unit floors.0 ... floors.7 (8 units): Floor, 1,024 parameters each
  group parameters 2, numel 1,024, padding_numel 0, shard_numel 256, is_trainable,
        tensor_parallel 0, storage float32, compute float32, gather float32, reduce float32,
        accumulate float32, main float32, optimizer_state float32, compute_weight Shard,
        main_gradient Shard, main_weight Shard, compute_bytes 1.0 KiB, main_bytes 0 B,
        gradient_bytes 1.0 KiB, padding_fraction 0.0000
memory allocator slots, slots 2, slot_bytes 4.0 KiB, buckets 2, bucket_bytes 4.0 KiB,
       forward_prefetch 1, backward_prefetch 1, persistent_bytes 17.0 KiB, optimizer_bytes 17.1 KiB,
       gathered_bytes 0 B, transient_peak_bytes 24.0 KiB
optimizer class_name AdamW, param_groups 1, parameters 18, step on local tensors, parts matrices 18"""


def test_text_of_a_small_model() -> None:
    described = told(steps=2)
    assert str(described) == GOLDEN
    assert json.loads(json.dumps(described.to_dict())) == described.to_dict()


def _described(steps: int) -> dict[str, Any]:
    with fixed_seed(0):
        module = Tower()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model, optimizer = fully_shard(module, adam(module.parameters()), mesh, fsdp_unit_modules=[Floor])
    for _ in range(steps):
        tower_loss(model, torch.ones(2, TOWER_FEATURES)).backward()
        optimizer.step()
    return model.describe().to_dict()


def test_real_ranks_say_what_simulated_ones_say(run_ranks: RunRanks) -> None:
    for rank, real in enumerate(run_ranks(2, _described, 2)):
        assert told(2, rank, 2).to_dict() == real


def test_no_collective_is_needed() -> None:
    with simulated_model(Tower, num_ranks=2, build_optimizer=adam) as simulated:
        before = simulated.model.traffic()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "all_gather_object", "all_gather", "broadcast", "barrier"):
                patch.setattr(dist, name, None)
            simulated.model.describe()
        assert simulated.model.traffic() == before


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (0, [("Replicate",), ("Replicate",), ("Replicate",), None]),
        (1, [("Replicate",), ("Shard",), ("Shard",), "float32"]),
        (3, [("Shard",), ("Shard",), ("Shard",), "float32"]),
    ],
)
def test_placements_of_strategies(strategy: int, expected: list[Any]) -> None:
    group = told(zero_dp_strategy=strategy).units[1].groups[0]
    assert [group.compute_weight, group.main_gradient, group.main_weight, group.gather] == expected


def test_axes_of_a_hybrid_mesh() -> None:
    described = told({"outer": 2, "inner": 4}, rank=6, dp_outer_dim="outer", outer_dp_sharding_strategy=1)
    assert [dataclasses.astuple(axis) for axis in described.axes] == [
        ("outer", "outer", 2, 1, (2, 6), "gloo", False),
        ("inner", "shard", 4, 2, (4, 5, 6, 7), "gloo", False),
    ]
    assert (described.strategy, described.outer_strategy) == ("optim_grads_params", "optim")
    assert described.units[1].groups[0].main_weight == ("Shard", "Shard")
    assert described.units[1].groups[0].shard_numel == FLOOR_NUMEL // 8
    assert "axis name outer, role outer, size 2, position 1, ranks 2 6, backend gloo\n" in str(described)


def test_tied_frozen_and_unused_parameters() -> None:
    tied = MODEL_CASES["tied"]
    described = told(2, build=tied.build, fsdp_unit_modules=list(tied.unit_classes))
    assert len(described.tied) == 1
    assert f"{described.tied[0][0]} is tied to {described.tied[0][1]}" in str(described)
    case = MODEL_CASES["unused"]
    with simulated_model(case.build, num_ranks=2, fsdp_unit_modules=list(case.unit_classes)) as simulated:
        assert simulated.model.describe().unused is None
        case.loss(simulated.model, case.make_batch(4, torch.Generator())).backward()
        unused = simulated.model.describe().unused
    assert unused is not None


class OwnAdam(torch.optim.AdamW):
    """A subclass, which may do anything."""


def test_optimizers() -> None:
    for kind, step in ((torch.optim.AdamW, "on local tensors"), (OwnAdam, "on DTensors")):
        with simulated_model(Tower, num_ranks=2, build_optimizer=kind, fsdp_unit_modules=[Floor]) as simulated:
            before = simulated.model.describe()
            tower_loss(simulated.model, torch.zeros(2, TOWER_FEATURES)).backward()
            assert simulated.optimizer is not None
            simulated.optimizer.step()
            after = simulated.model.describe()
            state = sum(
                local_tensor(value).nbytes for each in simulated.optimizer.state.values() for value in each.values()
            )
        assert [(o.class_name, o.param_groups, o.parameters, o.step) for o in after.optimizers] == [
            (kind.__name__, 1, 18, step)
        ]
        assert (before.memory.optimizer_bytes, after.memory.optimizer_bytes) == (0, state)
        assert before.units[0].groups[0].optimizer_state == ()
        assert after.units[0].groups[0].optimizer_state == ("float32",)
    assert told(2, build=Tower, zero_dp_strategy=0).optimizers[0].step == "on local tensors"


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (torch.optim.Muon, "on shards and whole matrices (Muon)"),
        (torch.optim.Adafactor, "on whole tensors, one owner each"),
    ],
)
def test_optimizers_of_whole_tensors(kind: type[torch.optim.Optimizer], step: str) -> None:
    with simulated_model(Tower, num_ranks=2, build_optimizer=kind, fsdp_unit_modules=[Floor]) as simulated:
        assert [each.step for each in simulated.model.describe().optimizers] == [step]


def test_tensor_parallel_parts() -> None:
    """Rank 3 of 4 x 2: of a floor's two weights both are cut, each half of 512 elements."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    with simulated_ranks({"dp": 4, "tp": 2}, rank=3) as mesh:
        module = built_without_memory(Tower)
        with real_values():
            across = mesh["tp"]
        for floor in module.floors:
            parallelize_module(floor, across, plan)
        described = fully_shard_model(module, mesh, "dp", tp_dim="tp", fsdp_unit_modules=[Floor]).describe()
    group = described.units[1].groups[0]
    assert (group.tensor_parallel, group.parameters, group.numel) == (2, 2, FLOOR_NUMEL // 2)
    assert [(axis.name, axis.role, axis.position, axis.ranks) for axis in described.axes] == [
        ("dp", "shard", 1, (1, 3, 5, 7)),
        ("tp", "tensor parallel", 1, (2, 3)),
    ]
    assert "tensor_parallel 2," in str(described)
