"""Every kind of model, grid of chunks, optimizer layout and generation: the output is the truth, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fsdp.checkpoint.convert.convert import ConversionReport, convert
from megatron_fsdp.checkpoint.convert.plan import ConvertOptions
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.errors import CheckpointError
from tests.support.on_ranks import assert_equal_tensors
from tests.support.torch_dist import (
    GptSpec,
    Truth,
    WriteOptions,
    expected_tensors,
    group_map,
    make_truth,
    split_halves,
    write_torch_dist,
)

MODELS = {
    "dense_swiglu": GptSpec(),
    "dense_gelu": GptSpec(swiglu=False, bias=True),
    "tied": GptSpec(tied=True),
    "homogeneous_moe": GptSpec(experts=4),
    "other_moe": GptSpec(layers=3, experts=4, dense_layers=1, shared_experts=True, expert_bias=True),
    "mtp": GptSpec(mtp=True),
    "mla": GptSpec(mla=True),
    "tower": GptSpec(tower=True),
}
TWO_WRAPPERS, THREE_WRAPPERS = "optimizer.state.module.module", "optimizer.state.module.module.module"


def tensors_of(folder: CheckpointFolder) -> dict[str, Tensor]:
    return {key: folder.read_tensor(key) for key in folder.tensors if not key.startswith("rng_state")}


def converted(
    tmp_path: Path, truth: Truth, written: WriteOptions | None = None, options: ConvertOptions | None = None
) -> tuple[CheckpointFolder, ConversionReport]:
    """Write a checkpoint and convert it; return the new folder, and what was told."""
    report = convert(write_torch_dist(tmp_path / "iter_0000007", truth, written), tmp_path / "out", options)
    return CheckpointFolder(tmp_path / "out"), report


WRITTEN = {
    "G1-tp2": WriteOptions(generation=1, tp=2),
    "G2-tp1": WriteOptions(generation=2),
    "G3-tp2": WriteOptions(generation=3, tp=2),
    "fp32-G1": WriteOptions(kind="plain", generation=1, tp=2),
    "fp32-G3": WriteOptions(kind="plain", tp=2),
    "singleton": WriteOptions(singleton=True, one_chunk=True),  # layers and experts keep their index
    "chained-G1": WriteOptions(chained_prefix=True, generation=1),
    "chained-G2": WriteOptions(chained_prefix=True, generation=2),
}
CASES = (
    *(("G1-tp2", model) for model in ("mla", "mtp", "tied", "tower")),
    *(("singleton", model) for model in ("dense_swiglu", "other_moe", "mtp")),
    ("G2-tp1", "dense_swiglu"),
    ("G3-tp2", "homogeneous_moe"),
    ("fp32-G1", "other_moe"),
    ("fp32-G3", "dense_gelu"),
    ("chained-G1", "dense_gelu"),
    ("chained-G2", "other_moe"),
)


@pytest.mark.full(cover=1)
@pytest.mark.parametrize(("written", "model"), CASES)
def test_every_generation_and_grid_of_every_model_converts_to_the_truth(
    tmp_path: Path, model: str, written: str
) -> None:
    truth, options = make_truth(MODELS[model]), WRITTEN[written]
    folder, report = converted(tmp_path, truth, options)
    wrappers = TWO_WRAPPERS if options.kind == "plain" else THREE_WRAPPERS
    assert_equal_tensors(tensors_of(folder), expected_tensors(truth, wrappers))
    assert report.written


def test_halves_that_are_apart_in_the_source_have_the_group_of_their_parameter(tmp_path: Path) -> None:
    truth = make_truth(MODELS["homogeneous_moe"])
    options = ConvertOptions(param_to_group=group_map(truth.spec))
    folder, _ = converted(tmp_path, truth, WriteOptions(singleton=True), options)
    name = "optimizer.param_to_group_meta.module.module.module.decoder.layers.1.mlp.experts.linear_fc1.weight3"
    assert all(folder.read_object(f"{name}{half}.is_expert_parallel") for half in ("", "_w", "_v"))


@pytest.mark.parametrize("kind", ["none", "dp_reshardable"])
@pytest.mark.parametrize("generation", [2, 3])
def test_weights_alone_convert_from_any_optimizer_layout(tmp_path: Path, kind: str, generation: int) -> None:
    truth = make_truth(MODELS["homogeneous_moe"])
    source = write_torch_dist(tmp_path / "iter_0000007", truth, WriteOptions(kind=kind, generation=generation))
    if kind == "dp_reshardable":
        with pytest.raises(CheckpointError, match=r"--dist-ckpt-optim-fully-reshardable.*--weights-only"):
            convert(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    report = convert(source, tmp_path / "out", ConvertOptions(weights_only=True))
    buckets = [item for item in report.plan.dropped if item.key.startswith("optimizer.distributed")]
    assert len(buckets) == (4 if kind == "dp_reshardable" else 0)
    weights = {f"model.module.{k}": v.bfloat16() for k, v in split_halves(truth.masters, True).items()}
    folder = CheckpointFolder(tmp_path / "out")
    assert_equal_tensors(tensors_of(folder), weights)
    assert not [key for key in folder.objects if key.startswith(("optimizer", "rng_state", "opt_param_scheduler"))]
    assert {"args", "iteration", "checkpoint_version"} <= folder.objects.keys()


def test_weights_only_takes_the_masters_where_there_are_some(tmp_path: Path) -> None:
    truth = make_truth(MODELS["dense_swiglu"])
    folder, _ = converted(tmp_path, truth, options=ConvertOptions(weights_only=True))
    weights = {f"model.module.{k}": v for k, v in split_halves(truth.masters, True).items()}
    assert_equal_tensors(tensors_of(folder), weights)


def test_momentum_of_sgd_converts(tmp_path: Path) -> None:
    truth = make_truth(MODELS["dense_swiglu"], slots=("momentum_buffer",))
    assert_equal_tensors(tensors_of(converted(tmp_path, truth)[0]), expected_tensors(truth))


def test_non_tensor_state_comes_over(tmp_path: Path) -> None:
    folder, _ = converted(tmp_path, make_truth(MODELS["dense_swiglu"]))
    read: Callable[[str], Any] = folder.read_object
    assert read("iteration") == 7
    assert read("checkpoint_version") == 3.0
    assert read("num_floating_point_operations_so_far") == 12345
    assert read("opt_param_scheduler.lr_decay_style") == "cosine"
    assert read("optimizer.param_groups.1.weight_decay") == 0.0
    args = read("args")
    assert (args.num_layers, args.swiglu, args.params_dtype) == (2, True, torch.bfloat16)
    assert args.attention_backend == "megatron.core.transformer.enums.AttnBackend(5)"  # text: nobody needs Megatron
    assert folder.metadata.planner_data["optimizer.param_groups.1.weight_decay"] == (
        "optimizer", "param_groups", 1, "weight_decay",
    )  # fmt: skip
    name = "module.module.module.decoder.layers.0.mlp.linear_fc2.weight"
    assert folder.metadata.planner_data[f"optimizer.state.{name}.exp_avg"] == ("optimizer", "state", name, "exp_avg")


def test_masters_may_be_left_behind(tmp_path: Path) -> None:
    truth = make_truth(MODELS["dense_swiglu"])
    folder, report = converted(tmp_path, truth, options=ConvertOptions(masters="model"))
    found = tensors_of(folder)["model.module.output_layer.weight"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, truth.masters["output_layer.weight"].bfloat16())
    assert any("--masters model" in note for note in report.plan.notes)
