"""Tensors cut in every way that sharding knows are saved whole and loaded into their shards."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_fsdp.checkpoint.hf import load_hf, save_hf
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import ListedCut, MeshUse, ShardDescription
from tests.checkpoint.hf.hf_models import same_tensors, stored
from tests.support.arrangements import mesh_of
from tests.support.on_ranks import on_ranks, same_on_ranks
from tests.support.uneven import CASES
from tests.support.zoo import Holder

DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def of_dtype(value: Tensor, index: int) -> Tensor:
    return (value * 1000).to(DTYPES[index % 3])


def wholes(num_ranks: int) -> dict[str, Tensor]:
    found = {f"c{i}": of_dtype(c.whole(i), i) for i, c in enumerate(CASES) if c.num_ranks == num_ranks}
    if num_ranks == 4:
        found["duplicates"] = torch.randn(4, 3, generator=torch.Generator().manual_seed(9))
        found |= {f"foreign{i}": torch.randn(7, 6, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    return found


def module_of(num_ranks: int) -> nn.Module:
    """All of them as the parameters and buffers of one module."""
    module = nn.Module()
    names = ("dim0", "dim1")
    for i, case in enumerate(CASES):
        if case.num_ranks == num_ranks:
            mesh = mesh_of(case.sizes, names[: len(case.sizes)])
            tensor = case.tensor(mesh, i)
            tensor = type(tensor).wrap(of_dtype(tensor.to_local(), i), tensor.shard_spec)
            module.register_parameter(f"c{i}", nn.Parameter(tensor, requires_grad=False))
    if num_ranks == 4:
        square = mesh_of((2, 2), names)
        module.register_parameter("duplicates", nn.Parameter(cut_in_two_ways(square)))
        ways = [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0)), (Replicate(), Replicate())]
        for i, way in enumerate(ways):
            whole = torch.randn(7, 6, generator=torch.Generator().manual_seed(i))
            module.register_parameter(f"foreign{i}", nn.Parameter(distribute_tensor(whole, square, way)))
    return module


def cut_in_two_ways(mesh: DeviceMesh) -> UnevenDTensor:
    """Tensor-parallel ranks that hold the same and cut it differently: the boxes of one of them are saved."""
    coordinate = tuple(mesh.get_coordinate() or ())
    cuts = (ListedCut((0, 4, 12)), ListedCut((0, 7, 12)))
    use = MeshUse((2, 2), (0,), 1)
    description = ShardDescription((4, 3), use, coordinate, cuts[coordinate[1]], None, cuts)
    start, stop = description.local_range
    return UnevenDTensor.wrap(wholes(4)["duplicates"].view(-1)[start:stop].clone(), ShardSpec(mesh, description))


def local_parts(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().to_local().clone() for name, p in module.named_parameters() if isinstance(p, DTensor)}


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@on_ranks()
def test_all_cuts_are_saved_and_loaded(tmp_path: Path, num_ranks: int) -> None:
    module, out = module_of(num_ranks), tmp_path / "out"
    before = local_parts(module)
    save_hf(module, out, max_shard_bytes=200)
    with torch.no_grad():
        for param in module.parameters():
            param.detach().to_local().zero_()  # type: ignore[attr-defined]
    assert not any(value.any() for value in local_parts(module).values())
    assert load_hf(module, out).is_complete
    assert same_tensors(local_parts(module), before)
    assert same_tensors(stored(out), wholes(num_ranks))


@on_ranks(2)
def test_experts_that_share_a_name_are_refused(tmp_path: Path) -> None:
    save_hf(module_of(2), tmp_path / "whole")
    module = module_of(2)
    param: DTensor = module.c0  # type: ignore[assignment]
    param.shard_spec.problem = "c0 is another expert on other ranks"  # type: ignore[attr-defined]
    for act, folder in ((save_hf, "out"), (load_hf, "whole")):
        with pytest.raises(CheckpointError, match=r"^c0 is another expert on other ranks$"):
            act(module, tmp_path / folder)  # type: ignore[operator]


# ---- ranks that hold different tensors, and ranks that take no part --------------------------------------------------


def stage(rank: int) -> nn.Module:
    """What one rank holds: something that all have, and an expert of its own."""
    model = Holder(shared=torch.full((40,), 3.0), experts=nn.ModuleDict({str(rank): nn.Linear(5, 7)}))
    for param in model.experts.parameters():
        nn.init.constant_(param, (rank + 1.0) * param.dim())
    return model


@on_ranks(3)
def test_ranks_may_hold_different_tensors(tmp_path: Path) -> None:
    mine = stage(dist.get_rank())
    before = {name: value.clone() for name, value in mine.named_parameters()}
    save_hf(mine, tmp_path / "out", max_shard_bytes=170)
    on_disk = stored(tmp_path / "out")
    assert len(on_disk) == 7
    assert same_tensors({name: on_disk[name] for name in before}, before)
    with torch.no_grad():
        for param in mine.parameters():
            param.zero_()
    report = same_on_ranks(load_hf(mine, tmp_path / "out"))
    assert set(report.loaded) == on_disk.keys()
    assert same_tensors(dict(mine.named_parameters()), before)
    with pytest.raises(CheckpointError, match="0 missing, 2 unexpected") as raised:
        load_hf(stage(dist.get_rank() % 2), tmp_path / "out")
    assert "experts.2.weight" in str(raised.value)


@on_ranks(3)
def test_ranks_outside_of_the_group_take_no_part(tmp_path: Path) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.fill_(index + 10 * dist.get_rank())  # the first rank of the group is right
    save_hf(model, tmp_path / "out", max_shard_bytes=300, group=group)
    assert load_hf(model, tmp_path / "out", group=group).is_complete
    assert [param.view(-1)[0].item() for param in model.parameters()] == list(range(10, 18))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4
    assert sorted({value.view(-1)[0].item() for value in stored(tmp_path / "out").values()}) == list(range(10, 18))
