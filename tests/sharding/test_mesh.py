"""Groups and sub-meshes on real process groups (gloo), one scenario per test."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.mesh import FSDPDistributedIndex
from tests.support.on_ranks import on_ranks

RunRanks = Callable[..., list[Any]]


def mesh_of(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def error_of(build: Callable[[], object]) -> str:
    try:
        build()
    except ConfigurationError as error:
        return str(error)
    return "no error"


# ---- one dimension ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_one_dimension_is_the_sharding_and_the_data_parallel_group() -> None:
    mesh = mesh_of((2,), "dp")
    index = FSDPDistributedIndex(mesh, dp_shard_dim="dp")
    result = {
        "use_hybrid_fsdp": index.use_hybrid_fsdp,
        "library": {key: found.mesh.tolist() for key, found in index.mesh_library.items()},
        "groups": [ranks(group) for group in (index.get_fsdp_group(), index.get_dp_group())],
        "absent": [
            index.get_outer_fsdp_group(),
            index.get_fsdp_group(independent_all_gather=True),
            index.get_fsdp_group(is_expert_parallel=True),
            index.get_dp_group(is_expert_parallel=True),
            index.get_root_mesh(is_expert_parallel=True),
        ],
        "root is the mesh": index.get_root_mesh() is mesh,
        "same object": index.get_submesh("dp") is index.get_submesh(["dp"]),
        "unknown": error_of(lambda: index.get_submesh(("dp", "tp"))),
        "unknown expert": error_of(lambda: index.get_submesh("dp", is_expert_parallel=True)),
        "logical rank": error_of(index.get_logical_hybrid_fsdp_rank),
    }
    assert result == {
        "use_hybrid_fsdp": False,
        "library": {("dp", False): [0, 1]},
        "groups": [[0, 1], [0, 1]],
        "absent": [None] * 5,
        "root is the mesh": True,
        "same object": True,
        "unknown": "there is no dense sub-mesh ('dp', 'tp'); the dense sub-meshes are ('dp',).",
        "unknown expert": "there is no expert sub-mesh ('dp',); the expert sub-meshes are none.",
        "logical rank": "a logical hybrid rank exists only with dp_outer_dim and hsdp_outer_dp_shard=True "
        "(and with expt_device_mesh for experts); set them.",
    }


# ---- hybrid, tensor parallel and experts -----------------------------------------------------------------------------


def hybrid_scenario() -> dict[str, Any]:
    mesh = mesh_of((2, 2, 1), "outer", "shard", "tp")
    expert_mesh = mesh_of((2, 1, 2), "outer", "shard", "ep")
    hybrid = dist.new_group([0, 1, 2, 3])
    expert_hybrid = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    gather_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    gather = gather_groups[dist.get_rank() // 2]
    index = FSDPDistributedIndex(
        mesh,
        dp_shard_dim="shard",
        dp_outer_dim="outer",
        hybrid_fsdp_group=hybrid,
        hybrid_fsdp_expt_group=expert_hybrid,
        hsdp_outer_dp_shard=True,
        expt_device_mesh=expert_mesh,
        fsdp_group_ag=gather,
    )
    with_tp = FSDPDistributedIndex(
        mesh, dp_shard_dim="shard", dp_outer_dim="outer", tp_dim="tp", hybrid_fsdp_group=hybrid
    )
    return {
        "dense": [ranks(index.get_fsdp_group()), ranks(index.get_outer_fsdp_group()), ranks(index.get_dp_group())],
        "expert": [
            ranks(index.get_fsdp_group(True)),
            ranks(index.get_outer_fsdp_group(True)),
            ranks(index.get_dp_group(True)),
        ],
        "gather": ranks(index.get_fsdp_group(independent_all_gather=True)),
        "keys": list(index.mesh_library),
        "dense table": index.get_submesh(("outer", "shard")).mesh.tolist(),
        "expert table": index.get_submesh(("outer", "shard"), is_expert_parallel=True).mesh.tolist(),
        "logical": index.get_logical_hybrid_fsdp_rank(),
        "logical expert": index.get_logical_hybrid_fsdp_rank(is_expert_parallel=True),
        "tp keys": list(with_tp.mesh_library),
        "tp table": with_tp.get_submesh(("outer", "shard", "tp")).mesh.tolist(),
    }


def test_hybrid_sharding_knows_every_group_of_dense_and_expert_parameters(run_ranks: RunRanks) -> None:
    results = run_ranks(4, hybrid_scenario)
    for rank, result in enumerate(results):
        outer, shard = divmod(rank, 2)
        assert result == {
            "dense": [[2 * outer, 2 * outer + 1], [shard, shard + 2], [0, 1, 2, 3]],
            "expert": [[rank], [shard, shard + 2], [shard, shard + 2]],
            "gather": [2 * outer, 2 * outer + 1],
            "keys": [
                ("outer", "shard", False),
                ("outer", False),
                ("shard", False),
                ("outer", "shard", True),
                ("outer", True),
                ("shard", True),
            ],
            "dense table": [[0, 1], [2, 3]],
            "expert table": [[shard], [shard + 2]],
            "logical": shard * 2 + outer,
            "logical expert": outer,
            "tp keys": [
                ("tp", False),
                ("outer", "shard", "tp", False),
                ("shard", "tp", False),
                ("outer", "shard", False),
                ("outer", False),
                ("shard", False),
            ],
            "tp table": [[[0], [1]], [[2], [3]]],
        }


# ---- flattened dimensions --------------------------------------------------------------------------------------------


def flattened_scenario() -> dict[str, Any]:
    mesh = mesh_of((2, 1, 2), "dp", "cp", "tp")
    mesh["dp", "cp"]._flatten("dp_cp")  # the only way torch offers; users of context parallelism call it
    index = FSDPDistributedIndex(mesh, dp_shard_dim="dp_cp", tp_dim="tp")
    whole = mesh_of((2, 2), "dp", "cp")
    flat = whole._flatten("all")
    reversed_mesh = mesh_of((2, 2), "tp", "dp")
    return {
        "group": ranks(index.get_fsdp_group()),
        "one": index.get_submesh("dp_cp").mesh.tolist(),
        "two": index.get_submesh(("dp_cp", "tp")).mesh.tolist(),
        "two's names": index.get_submesh(("dp_cp", "tp")).mesh_dim_names,
        "two's groups": [ranks(group) for group in index.get_submesh(("dp_cp", "tp")).get_all_groups()],
        "from the root": FSDPDistributedIndex(whole, dp_shard_dim="all").get_submesh("all").mesh.tolist(),
        "from itself": FSDPDistributedIndex(flat, dp_shard_dim="all").get_submesh("all") is flat,
        "from a part": ranks(FSDPDistributedIndex(mesh["dp"], dp_shard_dim="dp_cp").get_fsdp_group()),
        "against mesh order": FSDPDistributedIndex(reversed_mesh, dp_shard_dim="dp", tp_dim="tp")
        .get_submesh(("dp", "tp"))
        .mesh.tolist(),
        "overlap": error_of(lambda: FSDPDistributedIndex(mesh, dp_shard_dim="dp_cp", tp_dim="dp")),
        "outside": error_of(lambda: FSDPDistributedIndex(mesh["tp"], dp_shard_dim="dp_cp", tp_dim="tp")),
    }


def test_flattened_dimensions_work_like_any_other(run_ranks: RunRanks) -> None:
    for rank, result in enumerate(run_ranks(4, flattened_scenario)):
        dp, tp = divmod(rank, 2)
        assert result == {
            "group": [tp, tp + 2],
            "one": [tp, tp + 2],
            "two": [[0, 1], [2, 3]],
            "two's names": ("dp_cp", "tp"),
            "two's groups": [[tp, tp + 2], [2 * dp, 2 * dp + 1]],
            "from the root": [0, 1, 2, 3],
            "from itself": True,
            "from a part": [tp, tp + 2],
            "against mesh order": [[0, 2], [1, 3]],
            "overlap": "the dimensions ('dp_cp', 'dp') overlap; give dimensions that have only this rank in common.",
            "outside": "the dimensions ('dp_cp', 'tp') leave the device mesh ('tp',); "
            "give the mesh that contains them all.",
        }


# ---- errors ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_does_not_fit_together_is_refused() -> None:
    mesh = mesh_of((1, 2), "outer", "shard")
    group = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
    index = FSDPDistributedIndex
    hybrid: dict[str, Any] = {"dp_shard_dim": "shard", "dp_outer_dim": "outer", "hybrid_fsdp_group": group}
    result = {
        "no shard dim": error_of(lambda: index(mesh)),
        "unknown dim": error_of(lambda: index(mesh, dp_shard_dim="dp")),
        "unknown tp": error_of(lambda: index(mesh, dp_shard_dim="shard", tp_dim="tp")),
        "no names": error_of(lambda: index(DeviceMesh("cpu", [0, 1]), dp_shard_dim="dp")),
        "outer only": error_of(lambda: index(mesh, dp_shard_dim="shard", dp_outer_dim="outer")),
        "group only": error_of(lambda: index(mesh, dp_shard_dim="shard", hybrid_fsdp_group=group)),
        "outer shard only": error_of(lambda: index(mesh, dp_shard_dim="shard", hsdp_outer_dp_shard=True)),
        "expert group only": error_of(lambda: index(mesh, **hybrid, hybrid_fsdp_expt_group=group)),
        "expert gather only": error_of(lambda: index(mesh, dp_shard_dim="shard", expt_fsdp_group_ag=group)),
        "misspelt expert dim": error_of(
            lambda: index(mesh, **hybrid, expt_device_mesh=mesh_of((1, 2), "out", "shard"))
        ),
        "no expert shard dim": error_of(lambda: index(mesh, **hybrid, expt_device_mesh=mesh_of((1, 2), "outer", "dp"))),
        "wrong gather ranks": error_of(lambda: index(mesh, dp_shard_dim="shard", fsdp_group_ag=alone)),
        "wrong hybrid ranks": error_of(lambda: index(mesh, **{**hybrid, "hybrid_fsdp_group": alone})),
    }
    has = "is not a dimension of the device mesh, which has 'outer', 'shard'"
    rename = "name its dimensions as those of device_mesh, and 'ep' the one along which experts differ."
    give = "give one of these or the name of a flattened one."
    no_names = result.pop("no names")
    assert no_names.startswith("device_mesh=DeviceMesh(")
    assert no_names.endswith("has no dimension names; build it with init_device_mesh(..., mesh_dim_names=(...)).")
    assert result == {
        "no shard dim": "dp_shard_dim is missing; name the mesh dimension to shard over.",
        "unknown dim": f"dp_shard_dim='dp' {has}; {give}",
        "unknown tp": f"tp_dim='tp' {has}; {give}",
        "outer only": "dp_outer_dim is given without hybrid_fsdp_group; give both for hybrid sharding, or neither.",
        "group only": "hybrid_fsdp_group is given without dp_outer_dim; give both for hybrid sharding, or neither.",
        "outer shard only": "hsdp_outer_dp_shard needs dp_outer_dim, which is missing; give both or neither.",
        "expert group only": "hybrid_fsdp_expt_group needs expt_device_mesh, which is missing; give both or neither.",
        "expert gather only": "expt_fsdp_group_ag needs expt_device_mesh, which is missing; give both or neither.",
        "misspelt expert dim": f"expt_device_mesh has the dimensions 'out', 'shard' but not 'outer'; {rename}",
        "no expert shard dim": f"expt_device_mesh has the dimensions 'outer', 'dp' but not 'shard'; {rename}",
        "wrong gather ranks": "fsdp_group_ag is a group of 1 ranks that are not those along the mesh dimensions "
        "('shard',), which are [[0, 1]]; pass on every rank the group of exactly the ranks along them.",
        "wrong hybrid ranks": "hybrid_fsdp_group is a group of 1 ranks that are not those along the mesh "
        "dimensions ('outer', 'shard'), which are [[0, 1]]; pass on every rank the group of exactly the ranks "
        "along them.",
    }
