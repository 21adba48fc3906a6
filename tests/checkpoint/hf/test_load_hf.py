"""Files of transformers load into sharded models: the same logits, nothing but each rank's bytes, all or nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.checkpoint.hf import load_hf
from megatron_fsdp.checkpoint.hf.files import INDEX_FILE, MODEL_FILE, FolderReader, StoredTensor
from megatron_fsdp.sharding.shards import Box
from tests.checkpoint.hf.hf_models import build, logits, same_tensors, save_reference, shard
from tests.conftest import RunRanks

pytest.importorskip("transformers")

KINDS = ["llama", "gpt2", "mixtral", "qwen_moe"]


@dataclass(frozen=True)
class Loaded:
    """What one rank has after loading."""

    logits: Tensor
    report: Any
    bytes_read: int
    bytes_held: int
    weights: dict[str, Tensor]
    cuts_rows: bool


def load(
    kind: str,
    folder: str,
    strategy: int,
    changes: dict[str, Any] | None = None,
) -> Loaded:
    model = shard(build(kind, **(changes or {})), strategy)
    read, count = FolderReader.read, 0

    def counting(self: FolderReader, tensor: StoredTensor, box: Box) -> Tensor:
        nonlocal count
        values = read(self, tensor, box)
        count += values.nbytes
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderReader, "read", counting)
        report = load_hf(model, folder)
    params = list(model.parameters())
    held = sum(p.to_local().numel() * p.element_size() for p in params)  # type: ignore[attr-defined]
    cuts = any(p.shard_frame.description.is_cut_inside_rows for p in params)  # type: ignore[attr-defined]
    return Loaded(logits(model), report, count, held, model.full_parameters(), cuts)


@pytest.mark.full(short=["gpt2-3-3-9KB", "mixtral-3-3-9KB", "qwen_moe-2-2-5GB"])
@pytest.mark.parametrize(
    ("kind", "num_ranks", "strategy", "max_bytes"),
    [
        ("llama", 1, 3, "5GB"),
        ("llama", 2, 0, "9KB"),
        ("gpt2", 3, 3, "9KB"),
        ("mixtral", 3, 3, "9KB"),
        ("qwen_moe", 2, 2, "5GB"),
        ("qwen_moe", 4, 3, "9KB"),
    ],
)
def test_logits_are_those_of_transformers(
    run_ranks: RunRanks, tmp_path: Path, kind: str, num_ranks: int, strategy: int, max_bytes: str
) -> None:
    wanted = save_reference(tmp_path, kind, max_bytes)
    assert (tmp_path / INDEX_FILE).exists() == (max_bytes == "9KB")
    truth = dict(build(kind, seed=7).named_parameters())
    for rank, found in enumerate(run_ranks(num_ranks, load, kind, str(tmp_path), strategy)):
        assert torch.equal(found.logits, wanted), f"rank {rank}"
        assert same_tensors(found.weights, truth)
        assert set(found.report.loaded) == truth.keys()
        assert found.report.is_complete


def test_each_rank_reads_the_bytes_of_its_shards_and_no_others(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Three experts on four ranks: the rows of their weights are cut, and the shards begin inside of stored tensors."""
    changes = {"num_experts": 3, "moe_intermediate_size": 64}
    wanted = save_reference(tmp_path, "qwen_moe", "9KB", **changes)
    total = sum(p.numel() for p in build("qwen_moe", **changes).parameters()) * 4
    found = run_ranks(4, load, "qwen_moe", str(tmp_path), 3, changes)
    assert found[0].cuts_rows
    assert all(torch.equal(f.logits, wanted) for f in found)
    assert [f.bytes_read for f in found] == [f.bytes_held for f in found]
    assert sum(f.bytes_read for f in found) == total
    assert max(f.bytes_read for f in found) < total / 4 * 1.1
    low, high = (pick(f.bytes_read for f in found) for pick in (min, max))
    assert found[0].report.notes == (f"read {total} bytes on 4 ranks, {low} to {high} on each",)


# ---- dtypes, buffers, names ------------------------------------------------------------------------------------------


def load_half_into_full(folder: str) -> tuple[set[torch.dtype], dict[str, Tensor], Tensor]:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    model = shard(build("llama").to(torch.bfloat16), 3, mixed_precision_policy=policy)
    load_hf(model, folder)
    return {p.dtype for p in model.parameters()}, model.full_parameters(), logits(model)


def test_stored_weights_are_cast_to_main_weights(run_ranks: RunRanks, tmp_path: Path) -> None:
    plain = build("llama", seed=7).to(torch.bfloat16).eval()
    plain.save_pretrained(tmp_path)
    for dtypes, weights, found in run_ranks(2, load_half_into_full, str(tmp_path)):
        assert dtypes == {torch.float32}
        assert same_tensors(weights, {name: p.float() for name, p in plain.named_parameters()})
        assert torch.equal(found, logits(plain))


class WithBuffers(nn.Module):
    """Persistent buffers, one an integer without dimensions, and one that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.proj = nn.Linear(5, 3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def load_buffers(folder: str) -> tuple[Any, dict[str, Tensor]]:
    model = shard(WithBuffers())
    report = load_hf(model, folder, key_mapping={"^encoder_": "", r"\.w$": ".weight"})
    return report, {**model.full_parameters(), **dict(model.module.named_buffers())}


def test_persistent_buffers_are_loaded_and_keys_mapped(run_ranks: RunRanks, tmp_path: Path) -> None:
    values = {
        name: torch.rand_like(v) if v.is_floating_point() else v + 9 for name, v in WithBuffers().state_dict().items()
    }
    save_file({f"encoder_{name}".replace(".weight", ".w"): v for name, v in values.items()}, tmp_path / MODEL_FILE)
    for report, found in run_ranks(2, load_buffers, str(tmp_path)):
        assert set(report.loaded) == values.keys()
        assert same_tensors({name: found[name] for name in values}, values)
        assert torch.equal(found["scratch"], torch.zeros(2))


def test_a_model_with_a_head_takes_the_weights_of_a_base_model(tmp_path: Path) -> None:
    build("gpt2", seed=7).transformer.save_pretrained(tmp_path)
    keys = load_file(tmp_path / MODEL_FILE).keys()
    assert "wte.weight" in keys
    model = build("gpt2").eval()
    assert load_hf(model, tmp_path).is_complete
    assert torch.equal(logits(model), logits(build("gpt2", seed=7).eval()))


def test_names_of_memory_are_accepted_too(tmp_path: Path) -> None:
    """As `save_pretrained(save_original_format=False)` writes them: the experts of a layer as one tensor."""
    plain = build("mixtral", seed=7).eval()
    plain.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / MODEL_FILE)
    model = build("mixtral").eval()
    assert load_hf(model, tmp_path).is_complete
    assert torch.equal(logits(model), logits(plain))


def load_into_meta(kind: str, folder: str) -> Tensor:
    with torch.device("meta"):
        plain = build(kind)
    model = shard(plain, init_model_with_meta_device=True)
    load_hf(model, folder)
    return logits(model)


@pytest.mark.parametrize("kind", ["gpt2", "qwen_moe"])
def test_models_that_begin_on_the_meta_device_are_loaded(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    wanted = save_reference(tmp_path, kind)
    assert all(torch.equal(found, wanted) for found in run_ranks(2, load_into_meta, kind, str(tmp_path)))


def test_no_more_than_a_portion_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = save_reference(tmp_path, "mixtral")
    model = build("mixtral").eval()
    held: list[int] = []
    read = FolderReader.read

    def noting(self: FolderReader, tensor: StoredTensor, box: Box) -> Tensor:
        held.append(box.numel * tensor.dtype.itemsize)
        return read(self, tensor, box)

    monkeypatch.setattr(FolderReader, "read", noting)
    monkeypatch.setattr("megatron_fsdp.checkpoint.hf.files.PORTION_BYTES", 200)
    load_hf(model, tmp_path)
    assert max(held) <= 200
    assert sum(held) == sum(p.numel() for p in model.parameters()) * 4
    assert torch.equal(logits(model), wanted)
