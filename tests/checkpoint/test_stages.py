"""What stages of a pipeline put together for a checkpoint, and what one of them cannot load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_fsdp.checkpoint import load_checkpoint
from megatron_fsdp.checkpoint.naming import PipelinePlace, join_groups, stored_names
from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.errors import CheckpointError


def group(names: list[str], **options: Any) -> dict[str, Any]:
    return {"lr": 0.1, "betas": (0.9, 0.95), **options, "params": names}


@given(counts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4), equal=st.booleans())
def test_groups_of_stages_are_those_of_the_whole_model(counts: list[tuple[int, int]], equal: bool) -> None:
    """Two groups per stage, whose options may even be equal: positions tell them apart."""
    decays = (0.1, 0.1 if equal else 0.0)
    names = [[[f"s{i}.g{g}.p{k}" for k in range(pair[g])] for g in (0, 1)] for i, pair in enumerate(counts)]
    stages = [[group(each, weight_decay=decay) for each, decay in zip(row, decays, strict=True)] for row in names]
    whole = [group([name for row in names for name in row[g]], weight_decay=decays[g]) for g in (0, 1)]
    assert join_groups(stages) == whole


def test_stages_without_a_kind_of_parameter_are_put_together_by_options() -> None:
    first = [group(["a"], weight_decay=0.1), group(["b"], weight_decay=0.0), group(["c"], lr=torch.tensor(2.0))]
    last = [group(["d"], weight_decay=0.0), group(["e"], lr=torch.tensor(2.0)), group(["f"], lr=torch.tensor(3.0))]
    assert [each["params"] for each in join_groups([first, last])] == [["a"], ["b", "d"], ["c", "e"], ["f"]]


def stage() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False)})
    names = frozenset({"a.weight", "b.weight", "head.weight"})
    vars(model)["pipeline_place"] = PipelinePlace(0, 2, 0, names, {"head.weight": "a.weight"})
    return model


def test_either_name_of_what_is_tied_over_stages_will_do() -> None:
    assert stored_names(stage(), "a.weight") == ("a.weight", "head.weight")
    assert stored_names(stage(), "head.weight") == ("a.weight", "head.weight")
    assert stored_names(stage(), "b.weight") == ("b.weight",)
    assert stored_names(nn.Linear(1, 1), "weight") == ("weight",)


def test_state_by_position_is_refused_by_a_stage(tmp_path: Path) -> None:
    """Number 0 is a parameter of the first stage, whichever stage reads it."""
    model = stage()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["a"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_alone(saved, checkpoint_id=tmp_path / "folder")
    before = model["a"].weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"unexpected:\n  optimizer\.state\.0\.momentum_buffer"):
        load_checkpoint(model, optimizer, tmp_path / "folder")
    assert torch.equal(model["a"].weight, before)
    whole = nn.ModuleDict({"a": nn.Linear(3, 2, bias=False)})
    assert load_checkpoint(whole, torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9), tmp_path / "folder")
    assert torch.equal(whole["a"].weight, before)
