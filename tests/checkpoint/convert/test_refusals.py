"""Checkpoints that contradict themselves, or are something else: refused in words, and nothing is written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.checkpoint.convert.convert import Cells, TorchDistSource, convert
from megatron_fsdp.checkpoint.convert.plan import ConvertOptions, make_plan
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.errors import CheckpointError
from tests.checkpoint.convert.test_matrix import converted
from tests.support.torch_dist import GptSpec, WriteOptions, make_truth, plain, write_torch_dist

SPEC = GptSpec()
PROJECTION = "decoder.layers.self_attention.linear_proj.weight"


def refused(tmp_path: Path, written: WriteOptions, options: ConvertOptions | None = None) -> str:
    with pytest.raises(CheckpointError) as error:
        converted(tmp_path, make_truth(SPEC), written, options)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007"]
    return str(error.value)


def changed(change: Callable[[dict[str, Any]], Any]) -> WriteOptions:
    return WriteOptions(change_tensors=change)


def with_tensor(key: str, *shape: int) -> WriteOptions:
    return changed(lambda tensors: tensors.update({key: plain(torch.zeros(shape))}))


def common_changed(change: Callable[[dict[str, Any]], Any]) -> WriteOptions:
    return WriteOptions(change_common=change)


MOMENT, MASTER = f"optimizer.state.exp_avg.{PROJECTION}", "optimizer.state.fp32_param.output_layer.weight"
TWICE = "decoder.layers.1.self_attention.linear_proj.weight"
CONTRADICTIONS = {
    "state": (with_tensor(MOMENT, 2, 8, 4), f"{MOMENT} has shape (2, 8, 4), but {PROJECTION} has (2, 8, 8)"),
    "master": (with_tensor(MASTER), f"{MASTER} has shape (), but output_layer.weight has (20, 8)"),
    "a layer twice": (with_tensor(TWICE, 8, 8), f"several tensors of the checkpoint would become model.module.{TWICE}"),
    "groups": (
        common_changed(lambda common: common["optimizer"]["optimizer"].update(param_groups=7)),
        "param_groups are not a list of dicts",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_what_contradicts_itself(tmp_path: Path, kind: str) -> None:
    written, told = CONTRADICTIONS[kind]
    assert told in refused(tmp_path, written)


def test_optimizer_state_of_an_unknown_kind_stops_all_but_the_weights(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("optimizer.new_kind.w", "optimizer.state.exp_avg.no.such"), plain(torch.zeros(3)))
    written = changed(lambda tensors: tensors.update(unknown))
    assert "does not know: optimizer.new_kind.w, optimizer.state.exp_avg.no.such" in refused(tmp_path, written)
    written = changed(lambda tensors: tensors.update({"optimizer.new_kind.w": plain(torch.zeros(3))}))
    _, report = converted(tmp_path / "other", make_truth(SPEC), written, ConvertOptions(weights_only=True))
    assert [item.why for item in report.plan.dropped if item.key == "optimizer.new_kind.w"] == ["--weights-only"]


@pytest.mark.parametrize("marker", ["{", "[]", json.dumps({"sharded_backend": "zarr"}), None])
def test_a_marker_of_another_format(tmp_path: Path, marker: str | None) -> None:
    source = write_torch_dist(tmp_path / "iter_0000007", make_truth(SPEC))
    (source / "metadata.json").unlink() if marker is None else (source / "metadata.json").write_text(marker)
    told = r"metadata\.json is missing" if marker is None else r"metadata\.json.*|only torch_dist can be converted"
    with pytest.raises(CheckpointError, match=told):
        convert(source, tmp_path / "out")


def test_a_common_state_that_is_missing_or_no_dict(tmp_path: Path) -> None:
    source = write_torch_dist(tmp_path / "iter_0000007", make_truth(SPEC), WriteOptions(generation=2))
    torch.save(["not", "a", "dict"], source / "common.pt")
    with pytest.raises(CheckpointError, match="holds a list where the common state"):
        convert(source, tmp_path / "out")
    (source / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=r"common\.pt is missing: .* nor in common_state/shard_0_1"):
        convert(source, tmp_path / "out")


def test_cells_that_do_not_fit_their_true_shape() -> None:
    assert Cells.of("w", (2, 3, 8), (4, 12)).block == (2, 4)
    for stored, true in {(2, 3, 8): (4, 13), (2, 3, 9): (4, 12), (2, 8): (4, 12), (0, 3, 8): (4, 12)}.items():
        with pytest.raises(CheckpointError, match="does not fit its true shape"):
            Cells.of("w", stored, true)


def test_steps_that_groups_disagree_on_are_not_guessed(tmp_path: Path) -> None:
    def step_apart(common: dict[str, Any]) -> None:
        common["optimizer"]["optimizer"]["param_groups"][1]["step"] = 9

    source = write_torch_dist(tmp_path / "iter_0000007", make_truth(SPEC), common_changed(step_apart))
    convert(source, tmp_path / "none", ConvertOptions(groups="none"))
    assert not [key for key in CheckpointFolder(tmp_path / "none").tensors if key.endswith(".step")]
    convert(source, tmp_path / "infer")
    found = CheckpointFolder(tmp_path / "infer")
    prefix = "optimizer.state.module.module.module"
    assert found.read_tensor(f"{prefix}.output_layer.weight.step").item() == 7.0
    assert found.read_tensor(f"{prefix}.decoder.final_layernorm.weight.step").item() == 9.0


def test_a_parameter_without_a_master_among_others_with_is_noted(tmp_path: Path) -> None:
    written = changed(lambda tensors: tensors.pop("optimizer.state.fp32_param.output_layer.weight"))
    folder, report = converted(tmp_path, make_truth(SPEC), written)
    assert "no fp32 master weights of output_layer.weight; these are the model's" in report.plan.notes
    assert folder.tensors["model.module.output_layer.weight"].dtype == torch.bfloat16


def test_a_gradient_scaler_comes_over(tmp_path: Path) -> None:
    scaler = {"scale": 65536.0}
    written = common_changed(lambda common: common["optimizer"].update(grad_scaler=scaler))
    folder, _ = converted(tmp_path, make_truth(SPEC), written)
    assert folder.read_object("grad_scaler.scale") == 65536.0


def test_random_generators_of_several_data_parallel_ranks_are_left_behind(tmp_path: Path) -> None:
    content = TorchDistSource.open(write_torch_dist(tmp_path / "iter_0000007", make_truth(SPEC))).content
    key = "rng_state/shard_0.0_1.1"
    assert [value for value in make_plan(content, ConvertOptions()).values if value.target.startswith("rng_state")]
    several = replace(content, objects={**content.objects, key: [*content.objects[key]] * 2})
    plan = make_plan(several, ConvertOptions())
    assert not [value for value in plan.values if value.target.startswith("rng_state")]
    assert [item.why for item in plan.dropped if item.key == key] == [
        "states of several data-parallel ranks; the ranks of the new run are others"
    ]
    assert "random generators are left behind: load with --no-load-rng" in plan.notes
