"""Every kind of model, grid of chunks, optimizer layout and generation: the output is the truth, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fsdp.checkpoint.convert.convert import convert
from megatron_fsdp.checkpoint.convert.plan import ConvertOptions
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.errors import CheckpointError
from tests.support.parity import assert_equal_tensors
from tests.support.torch_dist.common import group_map
from tests.support.torch_dist.expected import expected_tensors, split_halves
from tests.support.torch_dist.gpt import GptSpec, make_truth
from tests.support.torch_dist.write import WriteOptions, write_torch_dist

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


def tensors_of(path: Path) -> dict[str, Tensor]:
    folder = CheckpointFolder(path)
    return {key: folder.read_tensor(key) for key in folder.tensors if not key.startswith("rng_state")}


@pytest.mark.full(
    short=["G1-tp2-mla", "G1-tp2-mtp", "G1-tp2-tied", "G1-tp2-tower", "G2-tp1-dense_swiglu", "G3-tp2-homogeneous_moe"]
)
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("written", [(1, 2), (2, 1), (3, 2)], ids=lambda w: f"G{w[0]}-tp{w[1]}")
def test_every_generation_and_grid_of_every_model_converts_to_the_truth(
    tmp_path: Path, model: str, written: tuple[int, int]
) -> None:
    truth = make_truth(MODELS[model])
    options = WriteOptions(generation=written[0], tp=written[1])
    report = convert(write_torch_dist(tmp_path / "iter_0000007", truth, options), tmp_path / "out")
    assert_equal_tensors(tensors_of(tmp_path / "out"), expected_tensors(truth))
    assert report.written


@pytest.mark.full(short=["1-other_moe"])
@pytest.mark.parametrize("model", ["dense_swiglu", "other_moe", "mla"])
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_a_plain_fp32_optimizer_converts_with_one_wrapper_less(tmp_path: Path, model: str, generation: int) -> None:
    truth = make_truth(MODELS[model])
    options = WriteOptions(kind="plain", generation=generation, tp=2)
    convert(write_torch_dist(tmp_path / "iter_0000007", truth, options), tmp_path / "out")
    assert_equal_tensors(tensors_of(tmp_path / "out"), expected_tensors(truth, TWO_WRAPPERS))


@pytest.mark.full(short=["dense_swiglu", "other_moe", "mtp"])
@pytest.mark.parametrize("model", sorted(MODELS))
def test_layers_and_experts_that_keep_their_index_convert_to_the_same(tmp_path: Path, model: str) -> None:
    truth = make_truth(MODELS[model])
    options = WriteOptions(singleton=True, one_chunk=True)
    convert(write_torch_dist(tmp_path / "iter_0000007", truth, options), tmp_path / "out")
    assert_equal_tensors(tensors_of(tmp_path / "out"), expected_tensors(truth))


def test_halves_that_are_apart_in_the_source_have_the_group_of_their_parameter(tmp_path: Path) -> None:
    truth = make_truth(MODELS["homogeneous_moe"])
    source = write_torch_dist(tmp_path / "iter_0000007", truth, WriteOptions(singleton=True))
    convert(source, tmp_path / "out", ConvertOptions(param_to_group=group_map(truth.spec)))
    folder = CheckpointFolder(tmp_path / "out")
    name = "optimizer.param_to_group_meta.module.module.module.decoder.layers.1.mlp.experts.linear_fc1.weight3"
    assert all(folder.read_object(f"{name}{half}.is_expert_parallel") for half in ("", "_w", "_v"))


@pytest.mark.parametrize("kind", ["none", "dp_reshardable"])
@pytest.mark.parametrize("generation", [2, 3])
def test_weights_alone_convert_from_any_optimizer_layout(tmp_path: Path, kind: str, generation: int) -> None:
    truth = make_truth(MODELS["homogeneous_moe"])
    source = write_torch_dist(tmp_path / "iter_0000007", truth, WriteOptions(kind=kind, generation=generation))
    convert(source, tmp_path / "out", ConvertOptions(weights_only=True))
    weights = {f"model.module.{k}": v.bfloat16() for k, v in split_halves(truth.masters, True).items()}
    assert_equal_tensors(tensors_of(tmp_path / "out"), weights)
    objects = CheckpointFolder(tmp_path / "out").objects
    assert not [key for key in objects if key.startswith(("optimizer", "rng_state", "opt_param_scheduler"))]
    assert {"args", "iteration", "checkpoint_version"} <= objects.keys()


def test_weights_only_takes_the_masters_where_there_are_some(tmp_path: Path) -> None:
    truth = make_truth(MODELS["dense_swiglu"])
    convert(write_torch_dist(tmp_path / "iter_0000007", truth), tmp_path / "out", ConvertOptions(weights_only=True))
    weights = {f"model.module.{k}": v for k, v in split_halves(truth.masters, True).items()}
    assert_equal_tensors(tensors_of(tmp_path / "out"), weights)


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_chained_prefixes_of_old_checkpoints_are_understood(tmp_path: Path, generation: int) -> None:
    truth = make_truth(MODELS["other_moe"])
    options = WriteOptions(chained_prefix=True, generation=generation)
    convert(write_torch_dist(tmp_path / "iter_0000007", truth, options), tmp_path / "out")
    assert_equal_tensors(tensors_of(tmp_path / "out"), expected_tensors(truth))


def test_a_padded_vocabulary_stays_padded(tmp_path: Path) -> None:
    truth = make_truth(GptSpec(vocabulary=128))
    convert(write_torch_dist(tmp_path / "iter_0000007", truth, WriteOptions(tp=2)), tmp_path / "out")
    assert tensors_of(tmp_path / "out")["model.module.embedding.word_embeddings.weight"].shape == (128, 8)


def test_momentum_of_sgd_converts(tmp_path: Path) -> None:
    truth = make_truth(MODELS["dense_swiglu"], slots=("momentum_buffer",))
    convert(write_torch_dist(tmp_path / "iter_0000007", truth), tmp_path / "out")
    assert_equal_tensors(tensors_of(tmp_path / "out"), expected_tensors(truth))


def test_non_tensor_state_comes_over(tmp_path: Path) -> None:
    truth = make_truth(MODELS["dense_swiglu"])
    convert(write_torch_dist(tmp_path / "iter_0000007", truth), tmp_path / "out")
    folder = CheckpointFolder(tmp_path / "out")

    def read(key: str) -> Any:
        return folder.read_object(key)

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
    source = write_torch_dist(tmp_path / "iter_0000007", truth)
    report = convert(source, tmp_path / "out", ConvertOptions(masters="model"))
    found = tensors_of(tmp_path / "out")["model.module.output_layer.weight"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, truth.masters["output_layer.weight"].bfloat16())
    assert any("--masters model" in note for note in report.plan.notes)


def test_prefixes_may_be_chosen(tmp_path: Path) -> None:
    truth = make_truth(MODELS["dense_swiglu"])
    options = ConvertOptions(model_prefix="model", optimizer_prefix="optimizer.state", group_prefix="groups.of")
    convert(write_torch_dist(tmp_path / "iter_0000007", truth), tmp_path / "out", options)
    folder = CheckpointFolder(tmp_path / "out")
    assert "model.output_layer.weight" in folder.tensors
    assert "optimizer.state.output_layer.weight.exp_avg" in folder.tensors
    assert "groups.of.output_layer.weight.lr" in folder.objects


def test_unknown_keys_are_an_error_that_lists_them(tmp_path: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        some = next(iter(tensors.values()))
        tensors["optimizer.state.exp_avg.no.such.weight"] = some
        tensors["optimizer.something_new"] = some

    source = write_torch_dist(
        tmp_path / "iter_0000007", make_truth(MODELS["dense_swiglu"]), WriteOptions(change_tensors=add)
    )
    with pytest.raises(CheckpointError, match=r"optimizer\.something_new, optimizer\.state\.exp_avg\.no\.such\.weight"):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007"]
