"""Cases of NeMo AutoModel's unit tests, restated from their descriptions: sections, meshes of 16 ranks, clipping."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp.automodel import (
    DDPConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MeshContext,
    MoEParallelizerConfig,
    ParallelismSizes,
    clip_grad_by_total_norm_,
    create_device_mesh,
    create_distributed_setup_from_config,
    derive_unit_modules,
    get_grad_norm,
    parse_distributed_section,
)
from megatron_fsdp.automodel.meshes import get_flat_mesh, get_fsdp_dp_mesh, get_submesh
from megatron_fsdp.comm.axis import real_values
from megatron_fsdp.plan.simulate import simulated_ranks
from tests.support.on_ranks import on_ranks

Section = dict[str, Any]

FIELDS: list[tuple[str, str, Any]] = [
    ("fsdp2", "defer_fsdp_grad_sync", False),
    ("fsdp2", "enable_fsdp2_prefetch", True),
    ("fsdp2", "fsdp2_backward_prefetch_depth", 3),
    ("fsdp2", "patch_is_packed_sequence", True),
    ("fsdp2", "reshard_after_forward", False),
    ("mfsdp", "zero_dp_strategy", 2),
    ("mfsdp", "overlap_grad_reduce", False),
    ("mfsdp", "report_nan_in_param_grad", True),
    ("mfsdp", "nccl_ub", True),
    ("ddp", "find_unused_parameters", True),
    ("ddp", "static_graph", True),
    ("ddp", "broadcast_buffers", True),
    ("ddp", "gradient_as_bucket_view", True),
    ("ddp", "bucket_cap_mb", 12.5),
    ("ddp", "autocast_dtype", torch.bfloat16),
]


def test_fields_of_a_section_reach_their_strategy() -> None:
    for strategy, name, value in FIELDS:
        given = "bfloat16" if value is torch.bfloat16 else value
        found = parse_distributed_section({"strategy": strategy, name: given})["strategy_config"]
        assert getattr(found, name) == value, name
        assert getattr(type(found)(), name) != value, name


GLOO: Section = {"backend": "gloo"}

SETUPS: list[tuple[Section | None, Section, Section]] = [
    (None, GLOO, {"tp_size": 1, "dp_size": 16}),
    (GLOO, {}, {"dp_size": 16}),
    (GLOO, {"strategy": "fsdp2", "tp_size": 2}, {"tp_size": 2, "dp_size": 8}),
    ({"tp_size": 4, **GLOO}, {"tp_size": 2}, {"tp_size": 2}),
    ({"tp_size": 4, **GLOO}, {"tp_size": None}, {"tp_size": 4}),
    ({"distributed": {"cp_size": 2, **GLOO}, "model": 1}, {}, {"cp_size": 2, "dp_size": 8}),
    ({"tp_size": 2, **GLOO}, {"world_size": 16, "ranks": range(16)}, {"dp_size": 8}),
    ({"pp_size": 2, "pipeline": {}, **GLOO}, {}, {"pp_size": 2, "pp_enabled": True, "dp_size": 8}),
    ({"ep_size": 4, **GLOO}, {"moe": {}}, {"ep_size": 4}),
    ({"strategy": "ddp", **GLOO}, {}, {"device_mesh": None, "dp_size": None}),
    ({"strategy": "mfsdp", "cp_size": 2, "tp_size": 2, **GLOO}, {}, {"dp_size": 4, "cp_size": 2, "tp_size": 2}),
]


@pytest.mark.parametrize(("config", "keywords", "expected"), SETUPS)
def test_sections_and_keywords_give_meshes(config: Section | None, keywords: Section, expected: Section) -> None:
    with simulated_ranks(16), real_values():
        context = create_distributed_setup_from_config(config, **keywords).mesh_context
        assert {name: getattr(context, name) for name in expected} == expected


@on_ranks(1)
def test_timeouts_come_from_the_whole_configuration() -> None:
    for whole, timeout, expected in (
        ({"distributed": GLOO, "dist_env": {"timeout_minutes": 7}}, None, 7),
        ({"distributed": GLOO, "dist_env": {"timeout_minutes": 7}}, 3, 3),
        ({"distributed": GLOO, "dist_env": {"backend": "nccl"}}, None, None),
    ):
        setup = create_distributed_setup_from_config(whole, timeout_minutes=timeout)
        assert setup.timeout_minutes == expected


def test_setups_keep_options_of_stages_and_experts() -> None:
    options: Section = {"pipeline": {"pp_schedule": "gpipe"}, "pp_size": 2, "ep_size": 2, "moe": {}}
    with simulated_ranks(4), real_values():
        setup = create_distributed_setup_from_config(None, activation_checkpointing="selective", **GLOO, **options)
    assert setup["pipeline_config"].pp_schedule == "gpipe"
    assert setup["moe_parallel_config"] == MoEParallelizerConfig()
    assert setup["activation_checkpointing"] == "selective"
    for given in ({"mp_policy": {"param_dtype": "float16"}}, {"pipeline": {"dtype": "float16"}}):
        parsed = parse_distributed_section({"pp_size": 2, "pipeline": {}, **given})
        assert parsed["pipeline_config"].dtype is torch.float16


def test_axes_of_many_ranks() -> None:
    fsdp2, megatron = FSDP2Config(backend="gloo"), MegatronFSDPConfig(backend="gloo")
    with simulated_ranks(16), real_values():
        built = MeshContext.build(fsdp2, ParallelismSizes(dp_replicate_size=2, tp_size=2, cp_size=2, ep_size=2))
        mesh: Any = built.device_mesh
        experts: Any = built.moe_mesh
        assert [get_flat_mesh(mesh, name).size() for name in ("dp", "dp_shard_cp", "dp_cp")] == [4, 4, 8]
        assert (experts.mesh_dim_names, tuple(experts.shape)) == (("ep_shard", "ep"), (8, 2))
        whole = MeshContext.from_meshes(mesh)
        assert (whole.dp_size, whole.ep_size, whole.parallelize_axis_kwargs()["ep_axis_name"]) == (4, 1, None)
        names = ("dp_replicate", "dp_shard_cp")
        for found in (get_fsdp_dp_mesh(mesh), get_fsdp_dp_mesh(mesh, *names), get_submesh(mesh, names)):
            assert found.mesh.tolist() == [[0, 2, 4, 6], [8, 10, 12, 14]]
        assert get_fsdp_dp_mesh(mesh, dp_shard_cp_name="dp_shard").shape == (2, 2)
        narrow: Any = create_device_mesh(megatron)[0]
        for axis in ("zz", "dp_cp"):
            with pytest.raises(ValueError, match=axis):
                get_flat_mesh(narrow, axis)


REFUSED: list[tuple[Any, str]] = [
    (MegatronFSDPConfig, "dp_replicate_size"),
    (MegatronFSDPConfig, "pp_size"),
    *((DDPConfig, name) for name in ("tp_size", "pp_size", "cp_size", "ep_size")),
]


def test_sizes_that_a_strategy_has_not_are_refused() -> None:
    for kind, name in REFUSED:
        with simulated_ranks(4), real_values(), pytest.raises(ValueError, match=name):
            MeshContext.build(kind(backend="gloo"), ParallelismSizes(**{name: 2}))


def parameter(*gradient: float) -> Any:
    made = nn.Parameter(torch.zeros(2))
    made.grad = torch.tensor(gradient) if gradient else None
    return made


def test_plain_gradients_are_measured_and_clipped() -> None:
    params = [parameter(3.0, -4.0), parameter()]
    found = [get_grad_norm(params, None, None, kind) for kind in (2.0, math.inf, "inf")]
    assert found == [5.0, 4.0, 4.0]
    assert get_grad_norm([parameter()]) == 0.0
    clip_grad_by_total_norm_(params, 10.0, 5.0)
    assert params[0].grad.tolist() == [3.0, -4.0]
    clip_grad_by_total_norm_(params, 1.0, 5.0)
    torch.testing.assert_close(params[0].grad, torch.tensor([0.6, -0.8]))
    clip_grad_by_total_norm_(params[0], 0.5, 1.0)
    torch.testing.assert_close(params[0].grad, torch.tensor([0.3, -0.4]))
    assert params[1].grad is None


def test_units_are_each_class_once() -> None:
    def model(names: Any, *parts: Callable[[], nn.Module]) -> Any:
        made: Any = nn.Sequential(*(part() for part in parts))
        made._no_split_modules = names
        return made

    found = derive_unit_modules(model(["Tanh", "ReLU", "Missing"], nn.Tanh, nn.GELU, nn.ReLU, nn.Tanh))
    assert sorted(kind.__name__ for kind in found) == ["ReLU", "Tanh"]
    assert derive_unit_modules(model(["Tanh"], nn.Tanh, nn.ReLU)) == [nn.Tanh]
