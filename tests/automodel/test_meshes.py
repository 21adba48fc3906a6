"""Device meshes of the strategies: axes and their order, what is sharded over, setups, and the flags of DDP."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    DistributedSetup,
    ParallelismSizes,
    ParallelSizes,
    PipelineConfig,
    parse_distributed_section,
)
from megatron_fsdp.automodel.config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from megatron_fsdp.automodel.managers import DDPManager
from megatron_fsdp.automodel.meshes import (
    MeshContext,
    build_mesh_context,
    create_device_mesh,
    get_flat_mesh,
    get_fsdp_dp_mesh,
    get_megatron_dp_axis,
    get_submesh,
    set_up_ranks,
)
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, ParallelSizeError
from tests.automodel.test_gradients import accumulate_like_the_whole_batch
from tests.automodel.training import assert_trained_alike, managed, reference, saved, strategy, train
from tests.conftest import RunRanks
from tests.support.language_models import build
from tests.support.on_ranks import on_ranks, refusal

FSDP2_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
FSDP2, MEGATRON, DDP = FSDP2Config(backend="gloo"), MegatronFSDPConfig(backend="gloo"), DDPConfig(backend="gloo")


def ranks_of(mesh: DeviceMesh) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group())


def described(context: MeshContext) -> dict[str, Any]:
    """Names, shape and, for each axis, this rank's neighbours on it."""
    mesh, experts = context.device_mesh, context.moe_mesh
    assert mesh is not None
    flat = ("dp", "dp_shard_cp", "dp_cp")
    known = [*(mesh.mesh_dim_names or ()), *(name for name in flat if name in mesh._flatten_mapping)]
    return {
        "names": mesh.mesh_dim_names,
        "shape": tuple(mesh.shape),
        "axes": {name: ranks_of(context.axis(name)) for name in known},
        "experts": None if experts is None else (experts.mesh_dim_names, experts.mesh.tolist()),
        "device": str(context.device),
        "data_rank": context.data_rank,
    }


def describe_meshes(config: Any, cases: list[dict[str, int]]) -> list[dict[str, Any]]:
    return [described(build_mesh_context(config, **sizes)) for sizes in cases]


def test_fsdp2_mesh_of_four_ranks_has_five_axes_and_three_across_several(run_ranks: RunRanks) -> None:
    cases = [{"tp_size": 2}, {"cp_size": 2}, {"dp_replicate_size": 2}, {"pp_size": 2}]
    by_rank = run_ranks(4, describe_meshes, FSDP2, cases)
    assert all(case["names"] == FSDP2_AXES for case in by_rank[1])
    shapes = [(1, 1, 2, 1, 2), (1, 1, 2, 2, 1), (1, 2, 2, 1, 1), (2, 1, 2, 1, 1)]
    assert [case["shape"] for case in by_rank[1]] == shapes
    pair, half, everyone = [1, 3], [0, 1], [0, 1, 2, 3]
    assert [[case["axes"][name] for name in (*FSDP2_AXES, "dp", "dp_shard_cp", "dp_cp")] for case in by_rank[1]] == [
        [[1], [1], pair, [1], half, pair, pair, pair],
        [[1], [1], pair, half, [1], pair, everyone, everyone],
        [[1], pair, half, [1], [1], everyone, half, everyone],
        [pair, [1], half, [1], [1], half, half, half],
    ]
    assert by_rank[2][0]["axes"]["dp"] == [0, 2]
    data_ranks = [[case["data_rank"] for case in found] for found in zip(*by_rank, strict=True)]
    assert data_ranks == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 2, 3], [0, 1, 0, 1]]
    assert (by_rank[1][0]["experts"], by_rank[1][0]["device"]) == (None, "cpu")


def test_expert_mesh_lies_across_the_ranks_of_a_stage_with_experts_innermost(run_ranks: RunRanks) -> None:
    cases = [{"ep_size": 2}, {"ep_size": 4}, {"ep_size": 2, "tp_size": 2}, {"ep_size": 2, "pp_size": 2}]
    by_rank = run_ranks(4, describe_meshes, FSDP2, cases)
    names = ("ep_shard", "ep")
    ranks = [[[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 1]]]
    assert [case["experts"] for case in by_rank[0]] == [(names, each) for each in ranks]
    assert by_rank[3][3]["experts"] == (names, [[2, 3]])
    assert by_rank[3][0]["axes"]["dp_shard"] == [0, 1, 2, 3]


def test_megatron_mesh_has_three_axes_and_one_across_two_with_context_parallelism(run_ranks: RunRanks) -> None:
    by_rank = run_ranks(4, describe_meshes, MEGATRON, [{"tp_size": 2}, {"cp_size": 2}])
    tensor, context = by_rank[1]
    assert tensor["names"] == context["names"] == ("dp", "cp", "tp")
    assert tensor["axes"] == {"dp": [1, 3], "cp": [1], "tp": [0, 1]}
    assert context["axes"] == {"dp": [1, 3], "cp": [0, 1], "tp": [1], "dp_cp": [0, 1, 2, 3]}
    assert [[case["data_rank"] for case in found] for found in zip(*by_rank, strict=True)] == [[0, 0, 1, 1]] * 2


@on_ranks(2)
def test_context_parallel_ranks_are_among_those_that_gradients_are_averaged_over() -> None:
    found: list[Any] = []
    for config in (MEGATRON, FSDP2):
        for sizes in ({}, {"cp_size": 2}):
            context = build_mesh_context(config, **sizes)
            mesh = context.device_mesh
            assert mesh is not None
            axis = get_megatron_dp_axis(mesh) if config is MEGATRON else None
            found.append((axis, ranks_of(context.gradient_axis())))
    assert found == [("dp", [0, 1]), ("dp_cp", [0, 1]), (None, [0, 1]), (None, [0, 1])]


@on_ranks(2)
def test_sizes_that_leave_ranks_out_or_do_not_fit_are_refused_alike_on_all_ranks() -> None:
    groups = len(dist.distributed_c10d._world.pg_map)
    messages = []
    cases: list[tuple[Any, dict[str, int]]] = [
        (FSDP2, {"dp_size": 1}),
        (FSDP2, {"tp_size": 3}),
        (MEGATRON, {"pp_size": 2}),
        (DDP, {"dp_size": 1}),
        (DDP, {"tp_size": 2}),
    ]
    for make in (build_mesh_context, create_device_mesh):
        for config, sizes in cases:
            messages.append(refusal(make, config, error=ParallelSizeError, **sizes))
    with pytest.raises(ConfigurationError, match=r"^world_size=3, but there are 2 ranks"):
        create_device_mesh(FSDP2, world_size=3)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    assert messages[0].startswith("dp_size x tp_size x pp_size x cp_size = 1 x 1 x 1 x 1 = 1, but world_size is 2")


@on_ranks(2)
def test_axes_are_looked_up_by_name() -> None:
    mesh, experts = create_device_mesh(FSDP2, world_size=2)
    assert mesh is not None
    assert experts is None
    assert get_flat_mesh(mesh["dp_shard"], "dp_shard").size() == 2
    assert get_flat_mesh(mesh["tp"], "dp_cp").size() == 2  # from the root of a part
    assert get_submesh(mesh, ("dp_shard", "tp")).mesh_dim_names == ("dp_shard", "tp")
    assert get_fsdp_dp_mesh(mesh, dp_shard_cp_name="dp_shard").mesh_dim_names == ("dp_shard",)
    with pytest.raises(ConfigurationError, match=r"^the mesh has no axis 'ep'; it has pp, .*, tp, dp, dp_shard_cp"):
        get_flat_mesh(mesh, "ep")
    assert "no axis 'ep'" in refusal(get_submesh, mesh, ("dp_shard", "ep"), error=ConfigurationError)
    assert create_device_mesh(DDP) == (None, None)
    context = build_mesh_context(DDP)
    assert context.device_mesh is None
    assert "there is no mesh, so no axis 'dp'" in refusal(context.axis, "dp", error=ConfigurationError)
    assert "there is no mesh" in refusal(context.gradient_axis, error=ConfigurationError)


SHARDED_OVER: list[tuple[dict[str, int], tuple[str, ...], list[Any]]] = [
    ({}, ("dp_shard",), [0, 1, 2, 3]),
    ({"cp_size": 2}, ("dp_shard_cp",), [0, 1, 2, 3]),
    ({"dp_replicate_size": 2}, ("dp_replicate", "dp_shard"), [[0, 1], [2, 3]]),
    ({"dp_replicate_size": 2, "cp_size": 2}, ("dp_replicate", "dp_shard_cp"), [[0, 1], [2, 3]]),
]
"""Sizes on four ranks, and what `get_fsdp_dp_mesh` gives."""


@on_ranks(4)
def test_fsdp2_shards_over_each_of_the_meshes() -> None:
    for sizes, names, ranks in SHARDED_OVER:
        mesh, _ = create_device_mesh(FSDP2, **sizes)
        assert mesh is not None
        shards = get_fsdp_dp_mesh(mesh)
        assert (shards.mesh_dim_names, shards.mesh.tolist()) == (names, ranks)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@on_ranks(1)
def test_the_back_end_of_a_group_says_where_ranks_compute() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set_up_ranks("nccl") == torch.device("cpu")
        for config in (FSDP2Config(), MegatronFSDPConfig()):
            mesh, _ = create_device_mesh(config)
            assert mesh is not None
            assert mesh.device_type == "cpu"
        assert DDPManager(DDPConfig()).device == torch.device("cpu")
    message = r"backend='nccl', but there is no accelerator.*backend='gloo'"
    with mock.patch.object(dist, "get_backend", return_value="fake"), pytest.warns(UserWarning, match=message):
        assert set_up_ranks("nccl") == torch.device("cpu")


ALONE = """
import torch.distributed as dist
from megatron_fsdp.automodel import FSDP2Config, build_mesh_context, create_device_mesh
context = build_mesh_context(FSDP2Config(backend="gloo"))
assert dist.get_world_size() == 1 and dist.get_backend() == "gloo"
assert tuple(context.device_mesh.shape) == (1, 1, 1, 1, 1) and context.device.type == "cpu"
try:
    create_device_mesh(FSDP2Config(backend="gloo"), tp_size=2)
except ValueError as error:
    print(error)
dist.destroy_process_group()
"""


def run_alone(**environment: str) -> str:
    base = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    base["PYTHONPATH"] = str(Path(__file__).parent.parent.parent / "src")
    command = [sys.executable, "-W", "error", "-c", ALONE]
    done = subprocess.run(command, env=base | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_program_without_torchrun_gets_a_group_of_one_rank() -> None:
    assert run_alone().startswith("world_size=1 cannot be divided by tp_size x pp_size x cp_size = 2 x 1 x 1 = 2")


# ---- setups, meshes that exist already, and the flags of DDP ---------------------------------------------------------


def test_a_setup_is_what_a_section_says() -> None:
    section = {"strategy": "megatron_fsdp", "tp_size": 2, "zero_dp_strategy": 2}
    config = MegatronFSDPConfig(zero_dp_strategy=2)
    for setup in (
        parse_distributed_section(section),
        DistributedSetup.build(config, tp_size=2),
        DistributedSetup.build(config, ParallelismSizes(tp_size=2)),
    ):
        assert setup == DistributedSetup(config, {"tp_size": 2})
        assert setup.arguments() == {"distributed_config": config, "tp_size": 2}
    assert DistributedSetup.build("ddp").config == DDPConfig()


@on_ranks(2)
def test_setups_and_meshes_stand_in_place_of_sizes(tmp_path: Path) -> None:
    folder, config = saved("llama", tmp_path), strategy("megatron_fsdp")
    mesh, _ = create_device_mesh(config, tp_size=2)
    bare = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    setup = DistributedSetup.build(config, tp_size=2)
    around = DistributedSetup(mesh_context=MeshContext.from_meshes(mesh), strategy_config=config)
    assert around["tp_size"] == 2
    ways: list[tuple[dict[str, Any], DeviceMesh | None]] = [
        ({"distributed_setup": setup}, None),
        ({"distributed_setup": around}, mesh),
        ({"distributed_config": config, "device_mesh": mesh}, mesh),
        ({"distributed_config": config, "device_mesh": bare}, bare),
    ]
    truth = reference("llama", steps=1)
    for way, given in ways:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **way)
        assert model.mesh_context.sizes == ParallelSizes(tp=2)
        assert given is None or model.mesh_context.device_mesh is given
        assert_trained_alike(train(model, steps=1), truth)
    replaced = ({"tp_size": 1}, {"distributed_config": config}, {"pipeline_config": PipelineConfig()})
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        *(("distributed_setup replaces", ConfigurationError, {"distributed_setup": setup, **way}) for way in replaced),
        ("replace sizes, and tp_size is given", ConfigurationError, {"device_mesh": mesh, "tp_size": 2}),
        ("moe_mesh alone is given", ConfigurationError, {"moe_mesh": mesh}),
        ("FSDP2Config takes", ConfigurationError, {"distributed_config": strategy("fsdp2"), "device_mesh": mesh}),
        ("DDPConfig takes none", ConfigurationError, {"distributed_config": strategy("ddp"), "device_mesh": mesh}),
        ("device_mesh is a MeshContext", TypeError, {"device_mesh": around.mesh_context}),
        *(
            (f"{name} is not supported yet: ", NotSupportedYetError, {name: object()})
            for name in ("fp8_config", "qat_config", "compile_config")
        ),
    ]
    for told, error, way in refused:
        given_config = {} if "distributed_setup" in way else {"distributed_config": config}
        assert told in refusal(AutoModelForCausalLM.from_pretrained, folder, error=error, **{**given_config, **way})


@on_ranks(2)
def test_flags_of_ddp_have_their_effect_and_train_as_one_process() -> None:
    for fields in (
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"bucket_cap_mb": 0.5, "broadcast_buffers": True, "gradient_as_bucket_view": True},
        {"activation_checkpointing": "selective"},
    ):
        model = managed(strategy("ddp", **fields), build("llama"))
        for name in ("find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view"):
            assert getattr(model, name) == fields.get(name, False)
        assert model.static_graph == ("static_graph" in fields)
        assert model.bucket_bytes_cap == fields.get("bucket_cap_mb", 25) * 2**20
        assert_trained_alike(train(model), reference("llama"))


@on_ranks(2)
def test_a_static_graph_accumulates_with_a_reduction_each_time() -> None:
    steps = accumulate_like_the_whole_batch("ddp", 2, static_graph=True)
    assert all(reductions > 0 for step in steps for reductions in step)
