"""A sharded model is saved as transformers saves it, by several ranks, all or nothing."""

import json
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.checkpoint.hf import load_hf, save_hf
from megatron_fsdp.checkpoint.hf.files import INDEX_FILE, MODEL_FILE
from megatron_fsdp.checkpoint.hf.live import FileTensor, Followed
from megatron_fsdp.checkpoint.hf.saving import Cut, lay_out_files
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.hf.hf_models import build, logits, same_tensors, shard, stored, trained
from tests.support.arrangements import hybrid_arguments
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.zoo import Holder

transformers = pytest.importorskip("transformers")


@pytest.mark.full(short=["gpt2-2-0-False-5000", "qwen_moe-2-1-False-1073741824", "mixtral-3-3-False-5000"])
@pytest.mark.parametrize(
    ("kind", "num_ranks", "strategy", "is_hybrid", "max_bytes"),
    [
        ("llama", 1, 3, False, 2**30),
        ("gpt2", 2, 0, False, 5000),
        ("mixtral", 3, 3, False, 5000),
        ("qwen_moe", 2, 1, False, 2**30),
        ("qwen_moe", 4, 3, True, 3000),
    ],
)
@on_ranks()
def test_what_is_saved_is_what_transformers_loads(
    tmp_path: Path, kind: str, strategy: int, is_hybrid: bool, max_bytes: int
) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    folder, arguments = tmp_path / "out", hybrid_arguments(2, dist.get_world_size() // 2) if is_hybrid else {}
    model, _ = trained(build(kind), strategy, **arguments)
    save_hf(model, folder, max_shard_bytes=max_bytes)
    weights = model.full_parameters()
    assert not same_tensors(weights, dict(build(kind).named_parameters()))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert same_tensors(dict(loaded.named_parameters()), weights)
    assert torch.equal(logits(loaded), logits(model))
    on_disk = stored(folder)
    assert same_tensors(on_disk, revert_weight_conversion(build(kind), weights))
    assert (folder / MODEL_FILE).exists() == (max_bytes == 2**30)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    if max_bytes == 2**30:
        return
    index = json.loads((folder / INDEX_FILE).read_text())
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in on_disk.items()}
    assert index["weight_map"].keys() == on_disk.keys()
    assert index["metadata"]["total_size"] == sum(sizes.values())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for file in files:
        inside = [key for key, value in index["weight_map"].items() if value == file]
        assert len(inside) == 1 or sum(sizes[key] for key in inside) <= max_bytes


# ---- dtypes and the files beside the weights -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_main_weights_are_saved_and_may_be_cast(tmp_path: Path, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    model = shard(build("llama").to(torch.bfloat16), 3, mixed_precision_policy=policy)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.001)
    model.install_optimized_model_weights()
    save_hf(model, tmp_path / "out", dtype=dtype)
    weights = model.full_parameters()
    assert any(not torch.equal(value, value.to(torch.bfloat16).float()) for value in weights.values())
    wanted = {name: value.to(dtype or torch.float32) for name, value in weights.items()}
    assert same_tensors(stored(tmp_path / "out"), wanted)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert said == ("bfloat16" if dtype else "float32")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    assert torch.equal(logits(loaded), logits(model))


def make_source(folder: Path) -> None:
    build("llama", rope_theta=77.0).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE.txt", "modeling_own.py"):
        (folder / name).write_text(name)
    for name in ("pytorch_model.bin", "optimizer.pt", INDEX_FILE, "trainer_state.json", "README.md", "a.safetensors"):
        (folder / name).write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("tools")


def test_config_and_tokenizer_files_are_carried_along(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    save_hf(build("llama"), tmp_path / "out", carry_from=tmp_path / "source")
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    weights = "config.json generation_config.json model.safetensors"
    beside = "tokenizer.json chat_template.jinja LICENSE.txt modeling_own.py additional_chat_templates/tools.jinja"
    assert found == {*weights.split(), *beside.split()}
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "source" / "config.json").read_text()
    save_hf(build("llama"), tmp_path / "cast", carry_from=tmp_path / "source", dtype=torch.float16)
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["dtype"] == "float16"


class Tokenizer:
    """Stands for one of transformers, which all have this method; notes what is in the target while it is called."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.seen: list[bool] = []

    def save_pretrained(self, folder: Path) -> None:
        self.seen.append(self.target.exists())
        (Path(folder) / "tokenizer.json").write_text("given")


def test_a_config_and_a_tokenizer_that_are_given_go_first(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    model = build("llama")
    given = build("llama", max_position_embeddings=99).config
    tokenizer = Tokenizer(tmp_path / "out")
    save_hf(model, tmp_path / "out", carry_from=tmp_path / "source", config=given, tokenizer=tokenizer)
    assert tokenizer.seen == [False]  # the folder appears when it is complete
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 99
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "given"


@on_ranks(2)
def test_modules_without_a_config_and_their_buffers_are_saved(tmp_path: Path) -> None:
    with fixed_seed(0):
        model = shard(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)))
    first = model.module[1].running_mean.clone()
    model.module[1].running_mean += dist.get_rank()  # ranks differ in buffers: the first one's are saved
    save_hf(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_FILE]
    buffers = {**dict(model.module.named_buffers()), "1.running_mean": first}
    assert same_tensors(stored(tmp_path), {**model.full_parameters(), **buffers})


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def fill_disk(_model: nn.Module) -> None:
    """The operating system lets rank 1 write no more than 2000 bytes to a file."""
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def other_shape_on_rank_1(model: nn.Module) -> None:
    model.module.register_buffer("extra", torch.zeros(3 - dist.get_rank()))  # type: ignore[union-attr]


def on_the_meta_device(model: nn.Module) -> None:
    model.module.register_buffer("extra", torch.zeros(3, device="meta"))  # type: ignore[union-attr]


def nothing(_model: nn.Module) -> None:
    """Leave a model as it is."""


@pytest.mark.parametrize(
    ("spoil", "options", "said"),
    [
        (fill_disk, {"max_shard_bytes": 3000}, r"^(?!.*rank 0).*rank 1: OSError"),
        (nothing, {"carry_from": "none"}, "has no config.json"),
        (other_shape_on_rank_1, {}, r"float32 of shape \(3,\) on rank 0, torch.float32 of shape \(2,\) on rank 1"),
        (on_the_meta_device, {}, "extra is on the meta device"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_saved_is_refused_by_all_and_leaves_nothing(
    tmp_path: Path, spoil: Callable[[nn.Module], None], options: dict[str, Any], said: str
) -> None:
    model = shard(build("llama"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    spoil(model)
    try:
        told = refusal(save_hf, model, tmp_path / "out", error=CheckpointError, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.search(said, told, re.DOTALL)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    model = build("llama")
    for options, said in (
        ({"max_shard_bytes": 0}, "max_shard_bytes=0"),
        ({"max_shard_bytes": "5GB"}, "max_shard_bytes='5GB': give a whole number of bytes"),
        ({"max_shard_bytes": 1.5}, r"max_shard_bytes=1\.5: give a whole number"),
        ({"max_shard_bytes": True}, "max_shard_bytes=True: give a whole number"),
        ({"dtype": "bfloat16"}, r"dtype='bfloat16' cannot hold .* give a floating-point torch\.dtype"),
        ({"dtype": torch.int8}, r"dtype=torch\.int8"),
        ({"dtype": torch.float8_e5m2}, r"dtype=torch\.float8_e5m2 cannot hold weights as they are"),
        ({"config": {"a": 1}}, "config is a dict without save_pretrained"),
        ({"tokenizer": "gpt2"}, "tokenizer is a str without save_pretrained"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            save_hf(model, tmp_path / "out", **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="nothing to save"):
        save_hf(nn.ReLU(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_stored_in_another_arrangement_are_refused(tmp_path: Path) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    model = build("llama")
    save_hf(model, tmp_path / "plain")
    model._weight_conversions = [WeightConverter("up.weight", "up_proj.weight", operations=[Transpose(0, 1)])]
    with pytest.raises(
        CheckpointError, match=r"transformers stores of .*up_proj.weight what is no slice of it, such as its transpose"
    ):
        save_hf(model, tmp_path / "out")
    report = load_hf(model, tmp_path / "plain")
    assert report.is_complete
    assert report.notes[0].startswith("tensors were looked for only as the model names them: transformers stores")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


# ---- tied weights ----------------------------------------------------------------------------------------------------


def test_tied_weights_are_stored_once_and_loaded_from_either_name(tmp_path: Path) -> None:
    model = build("gpt2", seed=7).eval()
    save_hf(model, tmp_path / "out")
    weights = stored(tmp_path / "out")
    assert "transformer.wte.weight" in weights
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights.pop("transformer.wte.weight")
    save_file(weights, tmp_path / "out" / MODEL_FILE, metadata={"format": "pt"})
    other = build("gpt2").eval()
    assert load_hf(other, tmp_path / "out").is_complete
    assert torch.equal(logits(other), logits(model))
    weights["transformer.wte.weight"] = weights["lm_head.weight"].double()  # in another dtype, but the same
    save_file(weights, tmp_path / "out" / MODEL_FILE, metadata={"format": "pt"})
    both = build("gpt2").eval()
    assert load_hf(both, tmp_path / "out").is_complete  # twice the same is no contradiction
    assert torch.equal(logits(both), logits(model))


# ---- wrappers --------------------------------------------------------------------------------------------------------


def scaled(value: float, has_buffer: bool) -> nn.Module:
    """A model whose only child has the name that wrappers use; with a buffer of its own, if asked for."""
    model = Holder({"scale": torch.full((3,), value)} if has_buffer else {}, module=nn.Linear(3, 3))
    for param in model.parameters():
        nn.init.constant_(param, value * param.dim())
    return model


@pytest.mark.parametrize("has_buffer", [True, False])
def test_a_child_called_module_keeps_its_name(tmp_path: Path, has_buffer: bool) -> None:
    model = scaled(2.0, has_buffer)
    save_hf(model, tmp_path / "out")
    assert same_tensors(stored(tmp_path / "out"), model.state_dict())
    (tmp_path / "plain").mkdir()
    save_file(model.state_dict(), tmp_path / "plain" / "model.safetensors")
    for folder in ("out", "plain"):
        other = scaled(3.0, has_buffer)
        assert load_hf(other, tmp_path / folder).is_complete
        assert same_tensors(other.state_dict(), model.state_dict())


# ---- plans of files: how they are laid out ---------------------------------------------------------------------------


def test_dtypes_are_cast_only_where_they_are_floating_point() -> None:
    tensors = {name: FileTensor.of(name, (2,)) for name in ("w", "n")}
    dtypes = {"w": torch.float32, "n": torch.int64}
    (inside,) = lay_out_files(tensors, dtypes, Cut(100, "m.safetensors", torch.bfloat16)).values()
    assert {tensor.key: tensor.dtype for tensor in inside} == {"w": torch.bfloat16, "n": torch.int64}
    with Followed({"w": (2,), "n": (2,)}) as followed:
        mixed = {"x": followed.file_tensor(torch.cat(list(followed.tensors.values())))}
    with pytest.raises(CheckpointError, match="x would be made of tensors of several dtypes"):
        lay_out_files(mixed, dtypes, Cut(100, "m.safetensors"))
    with pytest.raises(CheckpointError, match=r"w has dtype torch\.complex128"):
        lay_out_files(tensors, dtypes | {"w": torch.complex128}, Cut(100, "m.safetensors"))


@on_ranks(2)
def test_ranks_that_hold_the_rest_have_to_take_part(tmp_path: Path) -> None:
    model, rank = shard(nn.Linear(4, 6)), dist.get_rank()
    groups = [dist.new_group([each]) for each in range(2)]
    with pytest.raises(CheckpointError, match=r"all ranks that share it have to take part \(see the argument group\)"):
        save_hf(model, tmp_path / str(rank), group=groups[rank])
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
