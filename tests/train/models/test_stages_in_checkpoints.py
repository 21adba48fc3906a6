"""Checkpoints of pipeline stages and of divided experts are those of the whole model, on any ranks that follow."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from tests.conftest import RunRanks
from tests.support.on_ranks import of_ranks, on_ranks
from tests.train.models.runs import LLAMA, MIXTRAL, TIED, prepare, train_plainly, train_with_checkpoints

FSDP2 = {"use_torch_fsdp2": True}
STAGES = {**FSDP2, "pipeline_model_parallel_size": 2}
OWN = {"use_megatron_fsdp": True}
OWN_STAGES = {**OWN, "pipeline_model_parallel_size": 2}
OWN_EXPERTS = {**OWN, "expert_model_parallel_size": 2}
STEPS = 8


def keys_of(folder: Path) -> tuple[dict[str, tuple[int, ...]], set[str], Any]:
    """Shape of every tensor, other keys but for random states, and the groups of the optimizer."""
    found = CheckpointFolder(folder)
    objects = {key for key in found.objects if not key.startswith("rng_state.")}
    groups = found.read_object("optimizer.param_groups")
    return {key: entry.shape for key, entry in found.tensors.items()}, objects, groups


@pytest.mark.full(short=["model3-engines3"])
@pytest.mark.parametrize(
    ("model", "engines"),
    [
        (LLAMA, (STAGES, FSDP2, STAGES, FSDP2)),
        (TIED, (STAGES, FSDP2, STAGES, FSDP2)),
        (LLAMA, (OWN_STAGES, OWN, OWN_STAGES, OWN)),
        (LLAMA, (OWN_STAGES, FSDP2, STAGES, OWN)),
        (MIXTRAL, (OWN_EXPERTS, OWN, {**OWN_EXPERTS, **OWN_STAGES}, {**FSDP2, "expert_model_parallel_size": 2})),
    ],
)
def test_stages_and_whole_models_go_on_from_each_other(
    run_ranks: RunRanks, model: dict[str, Any], engines: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    """Two steps each on two ranks, one, four and two: stages or experts where a list of engines says so."""
    shape = {**model, "train_iters": STEPS, "lr_decay_style": "constant", "lr_warmup_iters": 0}
    plain = train_plainly(shape)
    folder = str(tmp_path / "saved")
    losses: list[float] = []
    for number, (ranks, engine) in enumerate(zip((2, 1, 4, 2), engines, strict=True)):
        values = {
            **shape,
            **engine,
            "train_iters": 2 * number + 2,
            "save": folder,
            **({"load": folder} if number else {}),
        }
        found = run_ranks(ranks, train_with_checkpoints, values)
        losses += found[0].losses
        assert all(each.losses == found[0].losses for each in found)
    torch.testing.assert_close(losses, plain.losses, rtol=4e-5, atol=0)
    for name, value in plain.weights.items():
        torch.testing.assert_close(found[0].weights[name], value, rtol=0, atol=4e-5)
    saved = [keys_of(tmp_path / "saved" / f"iter_{steps:07}") for steps in (2, 4, 6, 8)]
    assert [each[:2] for each in saved] == [saved[1][:2]] * 4
    if model is not MIXTRAL:  # whose groups follow the meshes of experts
        assert [each[2] for each in saved] == [saved[1][2]] * 4
    for _, _, groups in saved:
        names = [name for group in groups for name in group["params"]]
        assert sorted(names) == sorted(f"module.{name}" for name in plain.weights)


@pytest.mark.full
@on_ranks(4)
def test_every_stage_gets_its_own_random_stream_back(tmp_path: Path) -> None:
    run = prepare({**LLAMA, **STAGES})
    torch.manual_seed(100 + run.rank.index)
    save_checkpoint(run.trained.model, run.trained.optimizer, tmp_path, iteration=1)
    after_save = torch.rand(2).tolist()
    torch.manual_seed(0)
    report = load_checkpoint(run.trained.model, run.trained.optimizer, tmp_path)
    assert torch.rand(2).tolist() == after_save
    assert report.notes[-1] == "random states: restored for every logical rank"
    saved = {tuple(drawn) for drawn in of_ranks(after_save)}
    assert len(saved) == 4
    keys = {key for key in CheckpointFolder(tmp_path / "iter_0000001").objects if key.endswith(".states")}
    assert keys == {f"rng_state.({stage}, 0).{data}.states" for stage in (0, 1) for data in (0, 1)}
    run = prepare({**LLAMA, **FSDP2})
    report = load_checkpoint(run.trained.model, run.trained.optimizer, tmp_path)
    moved = {tuple(drawn) for drawn in of_ranks(torch.rand(2).tolist())}
    assert len(moved) == 4
    assert moved.isdisjoint(saved)
    assert "saved with (tensor, data, pipeline) ranks [1, 2, 2], now (1, 4)" in report.notes[-1]
