"""A checkpoint becomes a Hugging Face folder in one process, whatever ranks saved it."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp.checkpoint import save_checkpoint
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.hf import export_hf, save_hf
from megatron_fsdp.cli.main import main
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.hf.hf_models import build, logits, same_tensors, stored, trained
from tests.checkpoint.tools import builders
from tests.conftest import RunRanks

transformers = pytest.importorskip("transformers")


def train_and_save(kind: str, folder: str) -> Tensor:
    model, optimizer = trained(build(kind))
    save_checkpoint(model, optimizer, folder, iteration=10)
    return logits(model)


def config_folder(folder: Path, kind: str, **changes: object) -> Path:
    model = build(kind, **changes)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("tokens")
    (folder / "model.safetensors").write_text("weights of another run")
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_transformers_loads_what_the_command_writes(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    found, _ = run_ranks(2, train_and_save, kind, str(tmp_path / "run"))
    folder, config = tmp_path / "out", config_folder(tmp_path / "config", kind)
    command = ["checkpoint", "to-hf", str(tmp_path / "run"), str(folder), "--config", str(config)]
    assert main([*command, "--max-shard-bytes", "5000"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(loaded), found)
    assert not torch.equal(logits(build(kind).eval()), found)
    loaded.save_pretrained(tmp_path / "reference")
    assert same_tensors(stored(folder), stored(tmp_path / "reference"))
    files = {path.name: path for path in folder.iterdir()}
    weights = {name for name in files if name.endswith(".safetensors")}
    assert len(weights) > 3
    assert set(json.loads(files["model.safetensors.index.json"].read_text())["weight_map"].values()) == weights
    assert files.keys() - weights == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"
    }  # fmt: skip


LINKS = {
    "notes.txt": ("/etc/passwd", "is a link that leads out of its folder"),
    "vocab.json": ("/dev/zero", "is a link that leads out of its folder"),
    "merges.txt": ("nowhere", "No such file"),
    "additional_chat_templates": ("/etc", "is a link that leads out of its folder"),
    "config.json": ("../elsewhere/config.json", "is a link that leads out of its folder"),
}


@pytest.mark.parametrize("name", [*LINKS, "a pipe", "a large file"])
def test_only_files_of_the_config_folder_are_exported(tmp_path: Path, name: str) -> None:
    model = build("llama")
    source = saved_plainly(tmp_path / "source", model)
    config, out = config_folder(tmp_path / "config", "llama"), tmp_path / "out"
    config_folder(tmp_path / "elsewhere", "llama")
    told = "where a file should be"
    if name in LINKS:
        target, told = LINKS[name]
        (config / name).unlink(missing_ok=True)
        (config / name).symlink_to(target)
    elif name == "a pipe":
        os.mkfifo(config / "vocab.txt")
    else:
        with (config / "vocab.txt").open("wb") as file:
            file.truncate(1 << 40)
        told = "what is beside weights may have 1024 MiB in all"
    for export in (lambda: export_hf(source, out, config), lambda: save_hf(model, out, carry_from=config)):
        with pytest.raises((CheckpointError, ConfigurationError), match=told):
            export()
        assert not out.exists()


def saved_plainly(folder: Path, model: nn.Module) -> CheckpointFolder:
    return builders.save({"model": model.state_dict()}, folder)


def test_floating_point_weights_are_cast_on_request(tmp_path: Path) -> None:
    model = build("llama")
    source = saved_plainly(tmp_path / "source", model)
    names = export_hf(source, tmp_path / "out", config_folder(tmp_path / "config", "llama"), dtype=torch.bfloat16)
    assert names == ("model.safetensors",)
    assert same_tensors(stored(tmp_path / "out"), {n: p.to(torch.bfloat16) for n, p in model.named_parameters()})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_does_not_fit_the_config_is_refused(tmp_path: Path) -> None:
    source = saved_plainly(tmp_path / "source", build("llama"))
    untied = saved_plainly(tmp_path / "untied", build("llama", tie_word_embeddings=False))
    cases = [
        (source, config_folder(tmp_path / "wide", "llama", hidden_size=32), CheckpointError, "of shape .* and Llama"),
        (source, config_folder(tmp_path / "deep", "llama", num_hidden_layers=3), CheckpointError, "lacks 9 tensors"),
        (source, config_folder(tmp_path / "flat", "llama", num_hidden_layers=1), CheckpointError, "has, beyond .* 9"),
        (untied, config_folder(tmp_path / "tied", "llama", tie_word_embeddings=True), CheckpointError, "differ"),
        (source, tmp_path / "nowhere", ConfigurationError, "nowhere' is no folder; give the local folder of the model"),
    ]
    before = sorted(tmp_path.iterdir())
    for checkpoint, config, kind, said in cases:
        with pytest.raises(kind, match=said):
            export_hf(checkpoint, tmp_path / "out", config)
    with pytest.raises(CheckpointError, match="inside"):
        export_hf(source, tmp_path / "source" / "out", tmp_path / "wide")
    assert sorted(tmp_path.iterdir()) == before
