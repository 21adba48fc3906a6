"""Files of transformers load into sharded models: the same logits, nothing but each rank's bytes, all or nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.checkpoint.hf import load_hf
from megatron_fsdp.checkpoint.hf.files import INDEX_FILE, MODEL_FILE, FolderReader, StoredTensor
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box
from tests.checkpoint.hf.hf_models import build, logits, same_tensors, save_reference, shard
from tests.support.on_ranks import fixed_seed, of_ranks, on_ranks, once, refusal, same_on_ranks
from tests.support.zoo import Holder

pytest.importorskip("transformers")


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
@on_ranks()
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str, strategy: int, max_bytes: str) -> None:
    wanted, truth = save_reference(tmp_path, kind, max_bytes), dict(build(kind, seed=7).named_parameters())
    assert (tmp_path / INDEX_FILE).exists() == (max_bytes == "9KB")
    model = shard(build(kind), strategy)
    report = load_hf(model, tmp_path)
    assert torch.equal(logits(model), wanted)
    assert same_tensors(model.full_parameters(), truth)
    assert set(report.loaded) == truth.keys()
    assert report.is_complete


@contextmanager
def noted_reads() -> Iterator[list[int]]:
    """The bytes of each box that is read in the block."""
    read, found = FolderReader.read, list[int]()

    def noting(self: FolderReader, tensor: StoredTensor, box: Box) -> Tensor:
        found.append(box.numel * tensor.dtype.itemsize)
        return read(self, tensor, box)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderReader, "read", noting)
        yield found


@on_ranks(4)
def test_each_rank_reads_the_bytes_of_its_shards_and_no_others(tmp_path: Path) -> None:
    """Three experts on four ranks: the rows of their weights are cut, and the shards begin inside of stored tensors."""
    changes = {"num_experts": 3, "moe_intermediate_size": 64}
    wanted = save_reference(tmp_path, "qwen_moe", "9KB", **changes)
    model: Any = shard(build("qwen_moe", **changes))
    total = sum(p.numel() for p in model.parameters()) * 4
    with noted_reads() as noted:
        report = load_hf(model, tmp_path)
    assert torch.equal(logits(model), wanted)
    assert any(of_ranks(any(p.shard_spec.description.is_cut_inside_rows for p in model.parameters())))
    assert sum(noted) == sum(p.to_local().numel() for p in model.parameters()) * 4
    by_rank = of_ranks(sum(noted))
    assert sum(by_rank) == total
    assert max(by_rank) < total / 4 * 1.1
    assert report.notes == (f"read {total} bytes on 4 ranks, {min(by_rank)} to {max(by_rank)} on each",)


# ---- dtypes, buffers, names ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_stored_weights_are_cast_to_main_weights(tmp_path: Path) -> None:
    plain = build("llama", seed=7).to(torch.bfloat16).eval()
    once(lambda: plain.save_pretrained(tmp_path))
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    model = shard(build("llama").to(torch.bfloat16), 3, mixed_precision_policy=policy)
    load_hf(model, tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert same_tensors(model.full_parameters(), {name: p.float() for name, p in plain.named_parameters()})
    assert torch.equal(logits(model), logits(plain))


def with_buffers() -> nn.Module:
    """Persistent buffers, one an integer without dimensions, and one that is not persistent."""
    model = Holder(norm=nn.BatchNorm1d(5), proj=nn.Linear(5, 3))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    return model


@on_ranks(2)
def test_persistent_buffers_are_loaded_and_keys_mapped(tmp_path: Path) -> None:
    with fixed_seed(0):
        values = {
            name: torch.rand_like(value) if value.is_floating_point() else value + 9
            for name, value in with_buffers().state_dict().items()
        }
    renamed = {f"encoder_{name}".replace(".weight", ".w"): value for name, value in values.items()}
    once(lambda: save_file(renamed, tmp_path / MODEL_FILE))
    model = shard(with_buffers())
    report = load_hf(model, tmp_path, key_mapping={"^encoder_": "", r"\.w$": ".weight"})
    found = {**model.full_parameters(), **dict(model.module.named_buffers())}
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


@pytest.mark.parametrize("kind", ["gpt2", "qwen_moe"])
@on_ranks(2)
def test_models_that_begin_on_the_meta_device_are_loaded(tmp_path: Path, kind: str) -> None:
    wanted = save_reference(tmp_path, kind)
    with torch.device("meta"):
        plain = build(kind)
    model = shard(plain, init_model_with_meta_device=True)
    load_hf(model, tmp_path)
    assert torch.equal(logits(model), wanted)


def test_no_more_than_a_portion_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = save_reference(tmp_path, "mixtral")
    model = build("mixtral").eval()
    monkeypatch.setattr("megatron_fsdp.checkpoint.hf.files.PORTION_BYTES", 200)
    with noted_reads() as held:
        load_hf(model, tmp_path)
    assert max(held) <= 200
    assert sum(held) == sum(p.numel() for p in model.parameters()) * 4
    assert torch.equal(logits(model), wanted)


# ---- files that do not fit or cannot be read -------------------------------------------------------------------------


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
    "a cut file": ("llama", _cut, ["model.safetensors cannot be read as safetensors", "cut off"]),
}


@pytest.mark.parametrize("name", UNFIT)
@on_ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(tmp_path: Path, name: str) -> None:
    kind, spoil, said = UNFIT[name]
    save_reference(tmp_path, kind)
    once(lambda: spoil(tmp_path))
    model = shard(build(kind))
    before = model.full_parameters()
    told = refusal(load_hf, model, tmp_path, error=CheckpointError)
    assert [text for text in said if text not in told] == []
    assert same_tensors(model.full_parameters(), before)


@on_ranks(2)
def test_a_folder_that_one_rank_lacks_is_refused_by_all(tmp_path: Path) -> None:
    save_reference(tmp_path / "m", "llama")
    model = shard(build("llama"))
    before = model.full_parameters()
    for bad_rank, said in ((0, "elsewhere"), (1, "rank 1: CheckpointError")):
        with pytest.raises(CheckpointError, match=said) as raised:
            load_hf(model, tmp_path / ("elsewhere" if dist.get_rank() == bad_rank else "m"))
        same_on_ranks(str(raised.value).split("failed")[-1])
        assert same_tensors(model.full_parameters(), before)


@on_ranks(2)
def test_without_strict_what_fits_is_loaded_and_the_rest_is_said(tmp_path: Path) -> None:
    save_reference(tmp_path, "qwen_moe")
    for spoil in (_drop(EXPERT), _put(NORM, torch.ones(8)), _put("extra", torch.ones(2))):
        once(lambda: spoil(tmp_path))  # noqa: B023
    model = shard(build("qwen_moe"))
    before = model.full_parameters()
    report = load_hf(model, tmp_path, strict=False)
    after, truth = model.full_parameters(), dict(build("qwen_moe", seed=7).named_parameters())
    assert (len(report.loaded), report.unexpected) == (32, ("extra",))
    assert report.missing == ("model.layers.1.mlp.experts.gate_up_proj",)
    assert report.reshaped == {NORM: ((8,), (16,))}
    assert all(torch.equal(after[name], truth[name]) for name in report.loaded)
    assert all(torch.equal(after[name], before[name]) for name in (*report.missing, NORM))


@on_ranks(2)
def test_an_error_midway_says_that_the_model_is_partly_loaded(tmp_path: Path) -> None:
    """Rank 1's disk fails after the checks."""
    save_reference(tmp_path, "llama")
    model = shard(build("llama"))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(FolderReader, "read", Mock(side_effect=OSError("disk on fire")))
        told = refusal(load_hf, model, tmp_path, error=CheckpointError)
    for words in ("the model is partly loaded, load again before", "rank 1: CheckpointError", "disk on fire"):
        assert words in told
    assert "21 loaded, 0 missing" in str(load_hf(model, tmp_path))


def test_memory_that_cannot_be_written_to_is_found_before_anything_changes(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2), "rows": torch.ones(2, 3)}, tmp_path / MODEL_FILE)
    # All rows of the first are one place in memory.
    model, transposed = (
        Holder({"rows": rows}, weight=torch.full((2,), 5.0))
        for rows in (torch.arange(3.0).expand(2, 3), torch.arange(6.0).view(3, 2).T)
    )
    with pytest.raises(CheckpointError, match="several elements of rows share one place") as raised:
        load_hf(model, tmp_path)
    assert "partly loaded" not in str(raised.value)
    assert model.weight.tolist() == [5.0, 5.0]
    assert load_hf(transposed, tmp_path).is_complete
    assert transposed.rows.tolist() == [[1.0] * 3] * 2
