"""Groups and sub-meshes on real process groups (gloo), one scenario per test."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.comm.collectives import Traffic
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex, make_rank_mesh, rank_mesh_of
from tests.support.on_ranks import on_ranks
from tests.support.on_ranks import refusal as any_refusal

refusal = partial(any_refusal, error=ConfigurationError)


def mesh_of(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


@on_ranks(2)
def test_one_dimension_is_the_sharding_and_the_data_parallel_group() -> None:
    mesh = mesh_of((2,), "dp")
    index = FSDPDistributedIndex(mesh, dp_shard_dim="dp")
    assert not index.use_hybrid_fsdp
    assert {key: found.mesh.tolist() for key, found in index.mesh_library.items()} == {("dp", False): [0, 1]}
    assert ranks(index.get_fsdp_group()) == ranks(index.get_dp_group()) == [0, 1]
    assert index.get_outer_fsdp_group() is index.get_fsdp_group(independent_all_gather=True) is None
    assert index.get_fsdp_group(is_expert_parallel=True) is index.get_dp_group(is_expert_parallel=True) is None
    assert index.get_root_mesh(is_expert_parallel=True) is None
    assert index.get_root_mesh() is mesh
    assert index.get_submesh("dp") is index.get_submesh(["dp"])
    assert "no dense sub-mesh ('dp', 'tp')" in refusal(index.get_submesh, ("dp", "tp"))
    assert "no expert sub-mesh ('dp',)" in refusal(index.get_submesh, "dp", is_expert_parallel=True)
    assert "exists only with dp_outer_dim and hsdp_outer_dp_shard=True" in refusal(index.get_logical_hybrid_fsdp_rank)


@on_ranks(4)
def test_hybrid_sharding_knows_every_group_of_dense_and_expert_parameters() -> None:
    mesh = mesh_of((2, 2, 1), "outer", "shard", "tp")
    outer, shard = divmod(dist.get_rank(), 2)
    hybrid = dist.new_group([0, 1, 2, 3])
    index = FSDPDistributedIndex(
        mesh,
        dp_shard_dim="shard",
        dp_outer_dim="outer",
        hybrid_fsdp_group=hybrid,
        hybrid_fsdp_expt_group=[dist.new_group([0, 2]), dist.new_group([1, 3])][shard],
        hsdp_outer_dp_shard=True,
        expt_device_mesh=mesh_of((2, 1, 2), "outer", "shard", "ep"),
        fsdp_group_ag=[dist.new_group([0, 1]), dist.new_group([2, 3])][outer],
    )
    with_tp = FSDPDistributedIndex(
        mesh, dp_shard_dim="shard", dp_outer_dim="outer", tp_dim="tp", hybrid_fsdp_group=hybrid
    )
    inner, across = [2 * outer, 2 * outer + 1], [shard, shard + 2]
    assert groups_of(index, False) == [inner, across, [0, 1, 2, 3]]
    assert groups_of(index, True) == [[dist.get_rank()], across, across]
    assert ranks(index.get_fsdp_group(independent_all_gather=True)) == inner
    both = ("outer", "shard")
    of_data = [both, ("outer",), ("shard",)]
    assert list(index.mesh_library) == [(*dims, expert) for expert in (False, True) for dims in of_data]
    assert index.get_submesh(both).mesh.tolist() == [[0, 1], [2, 3]]
    assert index.get_submesh(both, is_expert_parallel=True).mesh.tolist() == [[shard], [shard + 2]]
    assert index.get_logical_hybrid_fsdp_rank() == shard * 2 + outer
    assert index.get_logical_hybrid_fsdp_rank(is_expert_parallel=True) == outer
    assert list(with_tp.mesh_library) == [
        (*dims, False) for dims in [("tp",), (*both, "tp"), ("shard", "tp"), *of_data]
    ]
    assert with_tp.get_submesh((*both, "tp")).mesh.tolist() == [[[0], [1]], [[2], [3]]]


def groups_of(index: FSDPDistributedIndex, expert: bool) -> list[list[int] | None]:
    return [ranks(get(expert)) for get in (index.get_fsdp_group, index.get_outer_fsdp_group, index.get_dp_group)]


@on_ranks(4)
def test_flattened_dimensions_work_like_any_other() -> None:
    dp, tp = divmod(dist.get_rank(), 2)
    mesh = mesh_of((2, 1, 2), "dp", "cp", "tp")
    mesh["dp", "cp"]._flatten("dp_cp")  # the only way torch offers; users of context parallelism call it
    index = FSDPDistributedIndex(mesh, dp_shard_dim="dp_cp", tp_dim="tp")
    across = [tp, tp + 2]
    assert ranks(index.get_fsdp_group()) == index.get_submesh("dp_cp").mesh.tolist() == across
    two = index.get_submesh(("dp_cp", "tp"))
    assert two.mesh.tolist() == [[0, 1], [2, 3]]
    assert two.mesh_dim_names == ("dp_cp", "tp")
    assert [ranks(group) for group in two.get_all_groups()] == [across, [2 * dp, 2 * dp + 1]]
    whole = mesh_of((2, 2), "dp", "cp")
    flat = whole._flatten("all")
    assert FSDPDistributedIndex(whole, dp_shard_dim="all").get_submesh("all").mesh.tolist() == [0, 1, 2, 3]
    assert FSDPDistributedIndex(flat, dp_shard_dim="all").get_submesh("all") is flat
    assert ranks(FSDPDistributedIndex(mesh["dp"], dp_shard_dim="dp_cp").get_fsdp_group()) == across
    against_order = FSDPDistributedIndex(mesh_of((2, 2), "tp", "dp"), dp_shard_dim="dp", tp_dim="tp")
    assert against_order.get_submesh(("dp", "tp")).mesh.tolist() == [[0, 2], [1, 3]]
    assert "('dp_cp', 'dp') overlap" in refusal(FSDPDistributedIndex, mesh, dp_shard_dim="dp_cp", tp_dim="dp")
    assert "('dp_cp', 'tp') leave the" in refusal(FSDPDistributedIndex, mesh["tp"], dp_shard_dim="dp_cp", tp_dim="tp")


# ---- errors ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_does_not_fit_together_is_refused() -> None:
    mesh = mesh_of((1, 2), "outer", "shard")
    group = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
    shard: dict[str, Any] = {"dp_shard_dim": "shard"}
    hybrid = {**shard, "dp_outer_dim": "outer", "hybrid_fsdp_group": group}
    has = "is not a dimension of the device mesh, which has 'outer', 'shard'"
    refusals: dict[str, dict[str, Any]] = {
        "dp_shard_dim is missing": {},
        f"dp_shard_dim='dp' {has}": {"dp_shard_dim": "dp"},
        f"tp_dim='tp' {has}": {**shard, "tp_dim": "tp"},
        "dp_outer_dim is given without hybrid_fsdp_group": {**shard, "dp_outer_dim": "outer"},
        "hybrid_fsdp_group is given without dp_outer_dim": {**shard, "hybrid_fsdp_group": group},
        "hsdp_outer_dp_shard needs dp_outer_dim": {**shard, "hsdp_outer_dp_shard": True},
        "hybrid_fsdp_expt_group needs expt_device_mesh": {**hybrid, "hybrid_fsdp_expt_group": group},
        "expt_fsdp_group_ag needs expt_device_mesh": {**shard, "expt_fsdp_group_ag": group},
        "fsdp_group_ag is a group of 1 ranks": {**shard, "fsdp_group_ag": alone},
        "is a group of 1 ranks that are not those along the mesh dimensions": {**hybrid, "hybrid_fsdp_group": alone},
    }
    for names, missing in ((("out", "shard"), "outer"), (("outer", "dp"), "shard")):
        words = f"expt_device_mesh has the dimensions {names[0]!r}, {names[1]!r} but not {missing!r}"
        refusals[words] = {**hybrid, "expt_device_mesh": mesh_of((1, 2), *names)}
    for words, arguments in refusals.items():
        assert words in refusal(FSDPDistributedIndex, mesh, **arguments)
    assert "has no dimension names" in refusal(FSDPDistributedIndex, DeviceMesh("cpu", [0, 1]), dp_shard_dim="dp")


@on_ranks(4)
def test_ranks_are_listed_in_one_order() -> None:
    for table in ([[0, 1], [2, 3]], [[3, 2], [1, 0]], [[2, 3], [0, 1]]):
        rank_mesh_of(DeviceMesh("cpu", table), {})
    # Rank 3 would be second of 0 and 3 along one dimension, but first in its row.
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("outer", "shard"))
    index = FSDPDistributedIndex(mesh, dp_shard_dim="shard", dp_outer_dim="outer", hybrid_fsdp_group=dist.group.WORLD)
    assert "ranks as [[3, 1], [0, 2]], with different orders along dimension 0" in refusal(rank_mesh_of, mesh, {})
    assert "with different orders" in refusal(make_rank_mesh, index, {"outer": Traffic(), "shard": Traffic()})
