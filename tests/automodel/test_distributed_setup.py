"""Strategy, sizes and meshes in one object, or as meshes that exist already; and the flags of DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    DDPConfig,
    DistributedSetup,
    MegatronFSDPConfig,
    MeshContext,
    ParallelismSizes,
    ParallelSizes,
    PipelineConfig,
    create_device_mesh,
    parse_distributed_section,
)
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from tests.automodel.process_groups import groups_destroyed
from tests.automodel.test_gradients import accumulate_like_the_whole_batch
from tests.automodel.training import assert_trained_alike, managed, reference, saved, strategy, train
from tests.support.language_models import build
from tests.support.on_ranks import on_ranks


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


def test_what_is_said_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sizes and tp_size are both given"):
        DistributedSetup.build(sizes=ParallelismSizes(tp_size=2), tp_size=2)
    with pytest.raises(TypeError, match="tp"):
        DistributedSetup.build(tp=2)
    with pytest.raises(ConfigurationError, match="Unknown strategy 'fsdp'"):
        DistributedSetup.build("fsdp")


@on_ranks(2)
def test_setups_and_meshes_stand_in_place_of_sizes(tmp_path: Path) -> None:
    folder, config = saved("llama", tmp_path), strategy("megatron_fsdp")
    with groups_destroyed():
        mesh, _ = create_device_mesh(config, tp_size=2)
        bare = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        ways: list[dict[str, Any]] = [
            {"distributed_setup": DistributedSetup.build(config, tp_size=2)},
            {"distributed_config": config, "device_mesh": mesh},
            {"distributed_config": config, "device_mesh": bare},
        ]
        for way in ways:
            model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **way)
            assert model.mesh_context.sizes == ParallelSizes(tp=2)
            assert_trained_alike(train(model, steps=1), reference("llama", steps=1))
        assert model.mesh_context.device_mesh is bare
        setup = ways[0]["distributed_setup"]
        for other in ({"tp_size": 1}, {"distributed_config": config}, {"pipeline_config": PipelineConfig()}):
            with pytest.raises(ConfigurationError, match="distributed_setup replaces"):
                AutoModelForCausalLM.from_pretrained(str(folder), distributed_setup=setup, **other)
        with pytest.raises(ConfigurationError, match="replace sizes, and tp_size is given"):
            AutoModelForCausalLM.from_pretrained(str(folder), distributed_config=config, device_mesh=mesh, tp_size=2)
        with pytest.raises(ConfigurationError, match="moe_mesh alone is given"):
            AutoModelForCausalLM.from_pretrained(str(folder), distributed_config=config, moe_mesh=mesh)
        for other, problem in ((strategy("fsdp2"), "FSDP2Config takes"), (strategy("ddp"), "DDPConfig takes none")):
            with pytest.raises(ConfigurationError, match=problem):
                AutoModelForCausalLM.from_pretrained(str(folder), distributed_config=other, device_mesh=mesh)


@on_ranks(4)
def test_contexts_describe_meshes_that_exist() -> None:
    config = strategy("fsdp2")
    with groups_destroyed():
        built = MeshContext.build(config, ParallelismSizes(dp_replicate_size=2, ep_size=2))
        mesh, experts = built.device_mesh, built.moe_mesh
        assert mesh is not None
        assert MeshContext.from_meshes(config, mesh, experts) == built
        bare = init_device_mesh("cpu", (1, 2, 2, 1, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"))
        context = MeshContext.from_meshes(config, bare)
        assert context.sizes == ParallelSizes(dp_replicate=2, dp_shard=2)
        assert context.axis("dp").size() == 4
        small = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp"))
        assert MeshContext.from_meshes(strategy("megatron_fsdp"), small).gradient_axis().size() == 4
        with pytest.raises(ParallelSizeError, match="must be less than dp_size"):
            MeshContext.from_meshes(
                config, init_device_mesh("cpu", (1, 4, 1, 1, 1), mesh_dim_names=bare.mesh_dim_names)
            )


@on_ranks(2)
def test_flags_of_ddp_have_their_effect_and_train_as_one_process() -> None:
    with groups_destroyed():
        for fields in (
            {"find_unused_parameters": False},
            {"static_graph": True},
            {"bucket_cap_mb": 1},
            {"activation_checkpointing": "selective"},
        ):
            model = managed(strategy("ddp", **fields), build("llama"))
            assert model.find_unused_parameters == (
                "find_unused_parameters" not in fields and "static_graph" not in fields
            )
            assert model.static_graph == ("static_graph" in fields)
            assert model.bucket_bytes_cap == fields.get("bucket_cap_mb", 25) * 2**20
            assert_trained_alike(train(model), reference("llama"))


@on_ranks(2)
def test_a_static_graph_accumulates_with_a_reduction_each_time() -> None:
    steps = accumulate_like_the_whole_batch("ddp", 2, static_graph=True)
    assert all(reductions > 0 for step in steps for reductions in step)
