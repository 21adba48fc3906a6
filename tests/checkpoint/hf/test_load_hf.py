"""Files of transformers load into sharded models: the same logits, nothing but each rank's bytes, all or nothing."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy
from megatron_fsdp.checkpoint.hf import load_hf
from megatron_fsdp.checkpoint.hf.index import INDEX_FILE, MODEL_FILE
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.hf.hf_models import build, logits, same_tensors, shard
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid_arguments

pytest.importorskip("transformers")

KINDS = ["llama", "gpt2", "mixtral", "qwen_moe"]


def save_reference(folder: Path, kind: str, max_bytes: str = "5GB", **changes: Any) -> Tensor:
    """A folder as transformers writes it; returns the logits of the model."""
    model = build(kind, seed=7, **changes).eval()
    model.save_pretrained(folder, max_shard_size=max_bytes)
    return logits(model)


@dataclass(frozen=True)
class Loaded:
    """What one rank has after loading."""

    logits: Tensor
    report: Any
    bytes_read: int
    bytes_held: int
    weights: dict[str, Tensor]
    cuts_rows: bool


class CountingFile(io.FileIO):
    """Counts what is read of weight files."""

    total = 0

    def readinto(self, buffer: Any, /) -> int:
        count = super().readinto(buffer)
        CountingFile.total += count
        return count


def load(
    kind: str,
    folder: str,
    strategy: int,
    options: Callable[[], dict[str, Any]] | None = None,
    changes: dict[str, Any] | None = None,
) -> Loaded:
    model = shard(build(kind, **(changes or {})), strategy, **(options() if options else {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_fsdp.checkpoint.hf.reading.io.FileIO", CountingFile)
        CountingFile.total = 0
        report = load_hf(model, folder)
    params = list(model.parameters())
    held = sum(p._local_tensor.numel() * p.element_size() for p in params)  # type: ignore[attr-defined]
    cuts = any(p.shard_frame.description.is_cut_inside_rows for p in params)  # type: ignore[attr-defined]
    return Loaded(logits(model), report, CountingFile.total, held, model.full_parameters(), cuts)


def hybrid_2x2() -> dict[str, Any]:
    return hybrid_arguments(2, 2)


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
    found = run_ranks(4, load, "qwen_moe", str(tmp_path), 3, None, changes)
    assert found[0].cuts_rows
    assert all(torch.equal(f.logits, wanted) for f in found)
    assert [f.bytes_read for f in found] == [f.bytes_held for f in found]
    assert sum(f.bytes_read for f in found) == total
    assert max(f.bytes_read for f in found) < total / 4 * 1.1
    low, high = (pick(f.bytes_read for f in found) for pick in (min, max))
    assert found[0].report.notes == (f"read {total} bytes on 4 ranks, {low} to {high} on each",)


def test_hybrid_sharding_reads_the_shards_of_each_replica(run_ranks: RunRanks, tmp_path: Path) -> None:
    wanted = save_reference(tmp_path, "mixtral")
    total = sum(p.numel() for p in build("mixtral").parameters()) * 4
    found = run_ranks(4, load, "mixtral", str(tmp_path), 3, hybrid_2x2)
    assert all(torch.equal(f.logits, wanted) for f in found)
    assert sum(f.bytes_read for f in found) == 2 * total


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


def load_base(folder: str) -> Tensor:
    model = build("llama")
    model = shard(model.model)
    load_hf(model, folder, strict=False)
    with torch.no_grad():
        return model(input_ids=torch.arange(6)[None]).last_hidden_state


def test_a_base_model_takes_the_weights_of_a_model_with_a_head(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    plain = build("llama", seed=7).eval().model
    with torch.no_grad():
        wanted = plain(input_ids=torch.arange(6)[None]).last_hidden_state
    assert all(torch.equal(found, wanted) for found in run_ranks(2, load_base, str(tmp_path)))


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


# ---- what does not fit -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """What one rank met, and whether its model is as it was."""

    message: str
    unchanged: bool
    after: list[str] = field(default_factory=list)


def refuse(kind: str, folder: str, changes: dict[str, Any], rank_without: int = -1) -> Refusal:
    model = shard(build(kind, **changes))
    before = model.full_parameters()
    path = folder if dist.get_rank() != rank_without else folder + "-elsewhere"
    with pytest.raises(CheckpointError) as raised:
        load_hf(model, path)
    return Refusal(str(raised.value), same_tensors(model.full_parameters(), before))


def _edit(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / MODEL_FILE)
    edit(tensors)
    save_file(tensors, folder / MODEL_FILE)


def _drop(key: str) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, lambda tensors: tensors.__delitem__(key))


def _put(key: str, value: Tensor) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, lambda tensors: tensors.update({key: value}))


def _cut(folder: Path) -> None:
    content = (folder / MODEL_FILE).read_bytes()
    (folder / MODEL_FILE).write_bytes(content[:-10])


NORM, EXPERT = "model.norm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"
UNFIT: dict[str, tuple[str, Callable[[Path], None], list[str]]] = {
    "missing": ("llama", _drop(NORM), ["20 loaded, 1 missing, 0 unexpected", NORM, "nothing was loaded"]),
    "unexpected": ("llama", _put("extra", torch.ones(2)), ["0 missing, 1 unexpected", "  extra"]),
    "reshaped": ("llama", _put(NORM, torch.ones(8)), ["1 of another shape", f"{NORM} (has (8,), wanted (16,))"]),
    "quantised": (
        "llama",
        _put(NORM, torch.ones(16).to(torch.float8_e4m3fn)),
        [f"'{NORM}' is stored as torch.float8_e4m3fn, and {NORM} is torch.float32"],
    ),
    "integers": ("llama", _put(NORM, torch.ones(16, dtype=torch.int32)), ["stored as torch.int32"]),
    "an expert missing": (
        "qwen_moe",
        _drop(EXPERT),
        ["model.layers.1.mlp.experts.gate_up_proj", f"stored only in part: 7 of 8, not {EXPERT}"],
    ),
    "an expert reshaped": ("qwen_moe", _put(EXPERT, torch.ones(12, 8)), [f"{EXPERT} (has (12, 8), wanted (12, 16))"]),
    "untied head": (
        "gpt2",
        _put("lm_head.weight", torch.ones(41, 16)),
        ["transformer.wte.weight and lm_head.weight are one tied weight in the model, and two different ones"],
    ),
    "a cut file": ("llama", _cut, ["ends at byte", "cut off"]),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(
    run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    kind, spoil, said = UNFIT[name]
    save_reference(tmp_path, kind)
    spoil(tmp_path)
    found = run_ranks(2, refuse, kind, str(tmp_path), {})
    assert found[0].message == found[1].message
    assert [text for text in said if text not in found[0].message] == []
    assert all(refusal.unchanged for refusal in found)


def test_another_model_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_reference(tmp_path, "gpt2")
    (message,) = {refusal.message for refusal in run_ranks(2, refuse, "llama", str(tmp_path), {})}
    assert "0 loaded, 21 missing, 28 unexpected" in message


def test_a_folder_that_one_rank_lacks_is_refused_by_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    save_reference(tmp_path / "m", "llama")
    for bad_rank in (0, 1):
        found = run_ranks(2, refuse, "llama", str(tmp_path / "m"), {}, bad_rank)
        assert found[0].message.split("failed")[1] == found[1].message.split("failed")[1]
        assert f"rank {bad_rank}: CheckpointError" in found[0].message
        assert all(refusal.unchanged for refusal in found)


def load_what_fits(folder: str) -> tuple[Any, bool, bool]:
    model = shard(build("qwen_moe"))
    before = model.full_parameters()
    report = load_hf(model, folder, strict=False)
    after, truth = model.full_parameters(), dict(build("qwen_moe", seed=7).named_parameters())
    not_loaded = set(report.missing) | {"model.norm.weight"}
    kept = all(torch.equal(after[name], before[name]) for name in not_loaded)
    return report, kept, all(torch.equal(after[name], truth[name]) for name in report.loaded)


def test_without_strict_what_fits_is_loaded_and_the_rest_is_said(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_reference(tmp_path, "qwen_moe")
    for spoil in (_drop(EXPERT), _put(NORM, torch.ones(8)), _put("extra", torch.ones(2))):
        spoil(tmp_path)
    for report, kept, right in run_ranks(2, load_what_fits, str(tmp_path)):
        assert kept
        assert right
        assert len(report.loaded) == 32
        assert report.missing == ("model.layers.1.mlp.experts.gate_up_proj",)
        assert report.unexpected == ("extra",)
        assert report.reshaped == {NORM: ((8,), (16,))}


def fail_midway(folder: str) -> list[str]:
    """Rank 1's disk fails after the checks."""
    model = shard(build("llama"))

    def failing(_self: io.FileIO, _buffer: Any, /) -> int:
        raise OSError("disk on fire")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            broken = type("Broken", (io.FileIO,), {"readinto": failing})
            patch.setattr("megatron_fsdp.checkpoint.hf.reading.io.FileIO", broken)
        with pytest.raises(CheckpointError) as raised:
            load_hf(model, folder)
    return [str(raised.value), str(load_hf(model, folder))]


def test_an_error_midway_says_that_the_model_is_partly_loaded(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    one, other = run_ranks(2, fail_midway, str(tmp_path))
    assert one == other
    assert "the model is partly loaded, load again before using it" in one[0]
    assert "rank 1: CheckpointError" in one[0]
    assert "disk on fire" in one[0]
    assert "21 loaded, 0 missing" in one[1]


def test_tensors_that_a_model_lets_pass_are_noted(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    for spoil in (_drop(NORM), _put("old_bias", torch.ones(1))):
        spoil(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"old_b.*"]
    model._keys_to_ignore_on_load_missing = [r"model\.norm"]
    report = load_hf(model, tmp_path)
    assert report.is_complete
    assert "old_bias is stored and was left out, as the model asks" in report.notes
    assert f"{NORM} is not stored and kept its value, as the model allows" in report.notes


def test_full_parameters_are_not_loaded_into(run_ranks: RunRanks, tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    assert run_ranks(1, load_inside_of_a_block, str(tmp_path)) == [True]


def load_inside_of_a_block(folder: str) -> bool:
    model: MegatronFSDP = shard(build("llama"))
    with model.full_parameters_context(), pytest.raises(ConfigurationError, match="full parameters at the moment"):
        load_hf(model, folder)
    return load_hf(model, folder).is_complete


def test_an_index_of_one_file_is_followed(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    (tmp_path / MODEL_FILE).rename(tmp_path / "weights.safetensors")
    keys = load_file(tmp_path / "weights.safetensors").keys()
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(keys, "weights.safetensors")}))
    assert load_hf(build("llama"), tmp_path).is_complete
