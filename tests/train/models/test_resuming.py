"""A run that is saved and goes on comes to what one run comes to, with every engine, with stages, and with others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from tests.conftest import RunRanks
from tests.train.models.runs import DECODER, LLAMA, MIXTRAL, TIED, Results, train_plainly, train_with_checkpoints

FSDP2 = {"use_torch_fsdp2": True}
UNITS = {"use_megatron_fsdp": True}


def train_twice(values: dict[str, Any], folder: str) -> tuple[Results, Results]:
    """Steps that are saved after the first half (or the second of three), and the rest once more from there."""
    half = (values["train_iters"] + 1) // 2
    values = {**values, "lr_decay_iters": values["train_iters"]}
    whole = train_with_checkpoints({**values, "save": folder, "save_interval": half})
    return whole, train_with_checkpoints({**values, "load": f"{folder}/iter_{half:07}", "save": f"{folder}-2"})


PIPELINE = {"pipeline_model_parallel_size": 2}
EIGHT = {"train_iters": 8}


@pytest.mark.full(short=["2-values0"])
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (2, {**DECODER, **UNITS, "fp16": True, "initial_loss_scale": 64.0}),
        (2, {**DECODER, **UNITS, "optimizer": "adamw8bit"}),
        (2, {**MIXTRAL, **FSDP2, "expert_model_parallel_size": 2}),
        (2, {**TIED, **FSDP2, **PIPELINE, **EIGHT, "async_save": True}),
        (4, {**LLAMA, **UNITS, **PIPELINE, **EIGHT, "tensor_model_parallel_size": 2}),
        (4, {**LLAMA, **PIPELINE, **EIGHT, "overlap_grad_reduce": True}),
    ],
)
def test_the_rest_is_the_same_from_a_checkpoint(
    run_ranks: RunRanks, ranks: int, values: dict[str, Any], tmp_path: Path
) -> None:
    for whole, resumed in run_ranks(ranks, train_twice, values, str(tmp_path / "saved")):
        half = (values["train_iters"] + 1) // 2
        assert resumed.losses == whole.losses[half:]
        assert resumed.norms == whole.norms[half:]
        assert resumed.held_out == whole.held_out
        assert resumed.weights.keys() == whole.weights.keys()
        assert all(torch.equal(resumed.weights[name], value) for name, value in whole.weights.items())


CHANGES: dict[str, dict[str, Any]] = {
    "adam": {"weight_decay": 0.5, "adam_beta1": 0.5, "adam_beta2": 0.5, "adam_eps": 0.1},
    "sgd": {"weight_decay": 0.5, "sgd_momentum": 0.1},
}


def train_twice_and_change(values: dict[str, Any], folder: str) -> Results:
    """Two steps, and the third with other options of the optimizer."""
    train_with_checkpoints({**values, "save": folder, "train_iters": 2})
    return train_with_checkpoints({**values, "load": folder, **CHANGES[values["optimizer"]]})


def change_third_step(step: int, optimizer: torch.optim.Optimizer) -> None:
    """The same changes by hand, with weight decay in the group that has it only."""
    if step != 2:
        return
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.5 if group["weight_decay"] else 0.0
        if "betas" in group:
            group.update(betas=(0.5, 0.5), eps=0.1)
        else:
            group["momentum"] = 0.1


@pytest.mark.full(short=["engine0-adam"])
@pytest.mark.parametrize(("engine", "optimizer"), [(UNITS, "adam"), (FSDP2, "sgd")])
def test_optimizer_options_that_changed_hold_from_the_next_step_on(
    run_ranks: RunRanks, engine: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    values = {name: value for name, value in DECODER.items() if optimizer == "adam" or name != "adam_eps"}
    values |= {"optimizer": optimizer, "lr_decay_style": "constant"}
    plain = train_plainly(values, change_third_step)
    unchanged = train_plainly(values)
    for found in run_ranks(2, train_twice_and_change, {**values, **engine}, str(tmp_path / "saved")):
        for name, value in plain.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=0, atol=2e-5)
        apart = max((found.weights[name] - value).abs().max().item() for name, value in unchanged.weights.items())
        assert apart > 5e-4  # the changes can be told


# ---- stages and divided experts -------------------------------------------------------------------------------------

STAGES = {**FSDP2, "pipeline_model_parallel_size": 2}
OWN_STAGES = {**UNITS, "pipeline_model_parallel_size": 2}
OWN_EXPERTS = {**UNITS, "expert_model_parallel_size": 2}
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
        (LLAMA, (OWN_STAGES, FSDP2, STAGES, UNITS)),
        (MIXTRAL, (OWN_EXPERTS, UNITS, {**OWN_EXPERTS, **OWN_STAGES}, {**FSDP2, "expert_model_parallel_size": 2})),
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
