"""Checkpoints of pipeline stages and of divided experts are those of the whole model, on any ranks that follow."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from tests.conftest import RunRanks
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


def refusals(values: dict[str, Any], folder: str) -> list[str]:
    """What each of some runs ends with."""
    told = []
    for layers in (1, 3):
        try:
            train_with_checkpoints({**values, "num_layers": layers + 1, "load": folder})
        except Exception as error:  # noqa: BLE001  the test looks at it
            told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.fixture(scope="module")
def three_layers(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder to which two stages of three layers have saved."""
    folder = str(tmp_path_factory.mktemp("three") / "saved")
    run_ranks(2, train_with_checkpoints, {**LLAMA, **STAGES, "num_layers": 3, "train_iters": 1, "save": folder})
    return folder


@pytest.mark.full
def test_what_does_not_fit_one_stage_is_refused_by_all(run_ranks: RunRanks, three_layers: str) -> None:
    (fewer, more), of_second = run_ranks(2, refusals, {**LLAMA, **STAGES}, three_layers)
    assert of_second == [fewer, more]
    assert "unexpected:\n  model.module.model.layers.2." in fewer
    assert "missing:\n  model.module.model.layers.3." in more
    assert fewer.count("layers.1.") == more.count("layers.1.") == more.count("layers.2.") == 0


def load_what_fits(values: dict[str, Any], folder: str) -> list[str]:
    """What is told of a load of a smaller model into this one."""
    run = prepare(values)
    report = load_checkpoint(run.trained.model, run.trained.optimizer, folder, strict=False)
    return [*report.loaded, *(f"lacks {key}" for key in report.missing)]


def test_all_ranks_are_told_what_any_stage_has_loaded(run_ranks: RunRanks, three_layers: str) -> None:
    first, last = run_ranks(2, load_what_fits, {**LLAMA, **STAGES, "num_layers": 4}, three_layers)
    assert first == last
    assert {"model.module.model.embed_tokens.weight", "model.module.lm_head.weight"} <= set(first)
    lacking = {told for told in first if told.startswith("lacks ")}
    assert lacking
    assert all("layers.3." in told for told in lacking)


def streams_after_loading(values: dict[str, Any], folder: str) -> tuple[list[float], list[float], str]:
    """What this rank's stream gives after it was saved, what it gives after that was loaded, and what is told of it."""
    run = prepare(values)
    trained = run.trained
    torch.manual_seed(100 + run.rank.index)
    save_checkpoint(trained.model, trained.optimizer, folder, iteration=1, overwrite=True)
    after_save = torch.rand(2).tolist()
    torch.manual_seed(0)
    report = load_checkpoint(trained.model, trained.optimizer, folder)
    return after_save, torch.rand(2).tolist(), report.notes[-1]


def streams_elsewhere(values: dict[str, Any], folder: str) -> tuple[list[float], str]:
    """What this rank's stream gives after loading what other ranks have saved."""
    run = prepare(values)
    report = load_checkpoint(run.trained.model, run.trained.optimizer, folder)
    return torch.rand(2).tolist(), report.notes[-1]


@pytest.mark.full
def test_every_stage_gets_its_own_random_stream_back(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    found = run_ranks(4, streams_after_loading, {**LLAMA, **STAGES}, folder)
    assert all(saved == loaded for saved, loaded, _ in found)
    assert len({tuple(saved) for saved, _, _ in found}) == 4
    assert {told for _, _, told in found} == {"random states: restored for every logical rank"}
    keys = {key for key in CheckpointFolder(Path(folder) / "iter_0000001").objects if key.endswith(".states")}
    assert keys == {f"rng_state.({stage}, 0).{data}.states" for stage in (0, 1) for data in (0, 1)}
    moved = run_ranks(4, streams_elsewhere, {**LLAMA, **FSDP2}, folder)
    assert len({tuple(drawn) for drawn, _ in moved}) == 4
    assert {tuple(drawn) for drawn, _ in moved}.isdisjoint(tuple(saved) for saved, _, _ in found)
    assert all("saved with (tensor, data, pipeline) ranks [1, 2, 2], now (1, 4)" in told for _, told in moved)
