"""Ranks that hold different tensors, and ranks that take no part."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp.checkpoint.hf import load_hf, save_hf
from megatron_fsdp.errors import CheckpointError
from tests.checkpoint.hf.hf_models import same_tensors, stored
from tests.conftest import RunRanks


class Stage(nn.Module):
    """What one rank holds: something that all have, and an expert of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.full((40,), 3.0))
        self.experts = nn.ModuleDict({str(rank): nn.Linear(5, 7)})
        with torch.no_grad():
            self.experts[str(rank)].weight.fill_(rank + 1.0)  # type: ignore[operator]
            self.experts[str(rank)].bias.fill_(-rank - 1.0)  # type: ignore[operator]


def save_and_load_stages(folder: str) -> tuple[Any, dict[str, Tensor], str]:
    stage = Stage(dist.get_rank())
    before = {name: value.clone() for name, value in stage.named_parameters()}
    save_hf(stage, folder, max_shard_bytes=170)
    with torch.no_grad():
        for param in stage.parameters():
            param.zero_()
    report = load_hf(stage, folder)
    assert same_tensors(dict(stage.named_parameters()), before)
    with pytest.raises(CheckpointError) as raised:
        load_hf(Stage(dist.get_rank() % 2), folder)
    return report, before, str(raised.value)


def test_ranks_may_hold_different_tensors(run_ranks: RunRanks, tmp_path: Path) -> None:
    found = run_ranks(3, save_and_load_stages, str(tmp_path / "out"))
    on_disk = stored(tmp_path / "out")
    assert same_tensors(on_disk, {name: value for _, before, _ in found for name, value in before.items()})
    assert len(on_disk) == 7
    for report, _, message in found:
        assert report == found[0][0]
        assert set(report.loaded) == on_disk.keys()
        assert "0 missing, 2 unexpected" in message
        assert "experts.2.weight" in message


def save_in_a_group(folder: str) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        with torch.no_grad():
            for index, param in enumerate(model.parameters()):
                param.fill_(index + 10 * dist.get_rank())  # the first rank of the group is right
        save_hf(model, folder, max_shard_bytes=300, group=group)
        assert load_hf(model, folder, group=group).is_complete
        assert [param.view(-1)[0].item() for param in model.parameters()] == list(range(10, 18))


def test_ranks_outside_of_the_group_take_no_part(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(3, save_in_a_group, str(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 4
    assert sorted({value.view(-1)[0].item() for value in stored(tmp_path / "out").values()}) == list(range(10, 18))
