"""The map from parameters to groups: dumped by ranks, exported, read, and refused where it makes no sense."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.convert.groups import (
    dump_param_to_param_group_map,
    export_group_map_json,
    group_map,
    read_group_map,
    read_group_map_json,
)
from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.conftest import RunRanks


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))


def test_groups_count_on_from_one_optimizer_to_the_next() -> None:
    model = two_layers()
    first = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias]}], lr=0.1)
    second = torch.optim.Adam([model[1].weight])
    assert group_map(model, [first, second]) == {"0.weight": 0, "0.bias": 1, "1.weight": 2}
    assert group_map(model, second) == {"1.weight": 0}


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"holds 3 parameters that are not the model's"):
        group_map(two_layers(), torch.optim.SGD(two_layers().parameters(), lr=0.1))


def dump_experts(folder: str, first_group: int) -> str:
    """Each rank has one expert, which it calls 0."""
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2, bias=False)]), "norm": nn.LayerNorm(2)})
    groups = [{"params": model["norm"].parameters()}, {"params": model["experts"].parameters()}]
    optimizer = torch.optim.SGD(groups if dist.get_rank() == 0 or not first_group else groups[::-1], lr=0.1)
    rank = dist.get_rank()
    try:
        dump_param_to_param_group_map(
            model, optimizer, folder, global_name=lambda name: name.replace("experts.0.", f"experts.{rank}.")
        )
    except CheckpointError as error:
        return str(error)
    return "dumped"


def test_ranks_with_other_experts_dump_all_of_them(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(2, dump_experts, str(tmp_path / "map"), 0) == ["dumped"] * 2
    expected = {"experts.0.weight": 1, "experts.1.weight": 1, "norm.weight": 0, "norm.bias": 0}
    assert read_group_map(tmp_path / "map") == expected


def test_ranks_that_disagree_are_refused_on_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(2, dump_experts, str(tmp_path / "map"), 1)
    assert first == second
    assert "ranks put norm.weight, norm.bias into different parameter groups" in first
    assert not (tmp_path / "map").exists()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    model = two_layers()
    (tmp_path / "mine").touch()
    with pytest.raises(CheckpointError, match="exists already and is not empty"):
        dump_param_to_param_group_map(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_indices_that_are_tensors_are_numbers(tmp_path: Path) -> None:
    save_alone({"module.module.w": torch.tensor(3), "module.module.b": 0}, checkpoint_id=tmp_path)
    assert read_group_map_json(export_group_map_json(tmp_path)) == {"model.module.w": 3, "model.module.b": 0}


def test_a_full_disk_leaves_the_old_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone({"module.w": 2}, checkpoint_id=tmp_path / "map")
    (tmp_path / "out").mkdir()
    path = export_group_map_json(tmp_path / "map", tmp_path / "out" / "m.json")
    before = path.read_bytes()

    def write_a_part(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text[:3].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_a_part)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_group_map_json(tmp_path / "map", path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"w": torch.zeros(3)}, r"holds tensors \(w\)"),
        ({"w": -1}, "count from 0: w: -1"),
        ({"w": "one"}, "count from 0: w: 'one'"),
        ({"w": True}, "count from 0: w: True"),
    ],
)
def test_a_checkpoint_that_is_no_map_is_refused(tmp_path: Path, content: dict[str, object], message: str) -> None:
    save_alone(content, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=message):
        export_group_map_json(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "cannot read the map of parameter groups from .*map.json"),
        ('{"a": 1, "b": 0, "a": 0}', "cannot read the map .*map.json: names that stand there twice: a"),
        ("[1]", "a JSON list"),
        ("{", "cannot read the map"),
        ('{"w": 1.5}', "w: 1.5"),
        ('{"w": -2}', "w: -2"),
    ],
)
def test_json_that_is_no_map_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_group_map_json(tmp_path / "map.json")
