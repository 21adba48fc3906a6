"""Checkpoints of pipeline stages and of divided experts are those of the whole model, on any ranks that follow."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from tests.conftest import RunRanks
from tests.train.models.runs import LLAMA, MIXTRAL, TIED, train_plainly, train_with_checkpoints

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


@pytest.mark.full(short=["model1-engines1"])
@pytest.mark.parametrize(
    ("model", "engines"),
    [
        (TIED, (STAGES, FSDP2, STAGES, FSDP2)),
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
