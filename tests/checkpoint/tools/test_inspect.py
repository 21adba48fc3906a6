"""What `inspect` says about each kind of checkpoint, those of this library's training among them."""

import json
import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.diff import diff
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.inspect import BLOCK, inspect_folder, parse_part, show, statistics_of
from megatron_fsdp.checkpoint.store import locate
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.test_load import contents, wrap
from tests.checkpoint.tools import builders
from tests.conftest import RunRanks
from tests.support import json_schema
from tests.support.doors import step
from tests.support.on_ranks import assert_equal_tensors
from tests.support.zoo import MODEL_CASES

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "schemas" / "inspect.schema.json").read_text())


@pytest.mark.parametrize("generation", ["G1", "G2", "G3"])
def test_each_generation_of_torch_dist_is_told(tmp_path: Path, generation: str) -> None:
    found = inspect_folder(builders.save_torch_dist(tmp_path / "a", generation))
    assert (found["format"], found["generation"], found["optimizer"]) == ("torch_dist", generation, "model_space")
    assert found["common"]["iteration"] == 7
    assert [found["common"]["args"][name] for name in ("num_layers", "swiglu", "num_experts")] == [2, True, None]
    assert found["marker"]["sharded_backend"] == "torch_dist"
    assert bool(found["mcore_data"]) == (generation == "G1")
    assert found["problems"] == []


def test_keys_shapes_and_bytes(tmp_path: Path) -> None:
    found = inspect_folder(builders.save_fsdp_dtensor(tmp_path / "a"))
    assert (found["format"], found["generation"], found["optimizer"]) == ("fsdp_dtensor", None, "per_parameter")
    assert found["common"]["iteration"] == 7
    by_key = {entry["key"]: entry for entry in found["entries"]}
    weight = by_key["model.module.layers.2.weight"]
    assert tuple(weight[name] for name in ("shape", "dtype", "nbytes", "chunks")) == ([4, 3], "float32", 48, 1)
    assert weight["files"] == ["__0_0.distcp"]
    assert found["files"]["__0_0.distcp"] == (tmp_path / "a" / "__0_0.distcp").stat().st_size
    assert by_key["iteration"]["shape"] is None
    order = [entry["key"] for entry in found["entries"] if entry["key"].startswith("model.")]
    assert order == [f"model.module.{name}" for name in ("layers.2.weight", "layers.10.weight", "norm.weight")]


@pytest.mark.parametrize("kind", ["G1", "G2", "G3", "fsdp_dtensor", "plain", "stats"])
def test_the_json_follows_the_schema(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind in ("G1", "G2", "G3"):
        folder = builders.save_torch_dist(path, kind)
    elif kind == "fsdp_dtensor":
        folder = builders.save_fsdp_dtensor(path)
    else:
        folder = builders.save({"w": torch.tensor([1.0, math.nan]), "o": {1, 2}, "n": torch.full((2,), math.inf)}, path)
    told = inspect_folder(folder, with_statistics=kind == "stats")
    assert json_schema.problems(json.loads(json.dumps(told, allow_nan=False)), SCHEMA) == []


def test_problems_are_named(tmp_path: Path) -> None:
    folder = builders.save_torch_dist(tmp_path / "a", "G2")
    (folder.path / "common.pt").write_bytes((folder.path / "common.pt").read_bytes()[:100])
    (folder.path / "metadata.json").unlink()
    found = inspect_folder(folder)
    assert "metadata.json is missing" in found["problems"][0]
    assert "common.pt is not an archive" in found["problems"][1]
    assert sum(entry["type"] == "tensor" for entry in found["entries"]) == len(folder.tensors)


def test_statistics_of_chunks_are_those_of_the_whole() -> None:
    values = torch.randn(BLOCK + 100, generator=torch.Generator().manual_seed(0))
    values[[3, 70, -1]] = torch.tensor([math.nan, math.inf, 0.0])
    found = statistics_of([values[:500], values[500:]])
    finite = values[values.isfinite()].double()
    assert (found["minimum"], found["maximum"]) == (finite.min().item(), finite.max().item())
    assert found["mean"] == pytest.approx(finite.mean().item(), rel=1e-12)
    assert found["norm"] == pytest.approx(finite.norm().item(), rel=1e-12)
    assert (found["non_finite"], found["zeros"]) == (2, int((values == 0).sum()))
    assert statistics_of([torch.full((2,), math.nan)])["minimum"] is None
    assert statistics_of([torch.tensor([3 + 4j, 0j])])["norm"] == 5.0
    assert statistics_of([torch.tensor([1e300, -1e300], dtype=torch.float64)])["norm"] is None
    assert statistics_of([torch.tensor([True, False])])["mean"] == 0.5


# ---- one tensor or object --------------------------------------------------------------------------------------------


INDEX = st.one_of(st.none(), st.integers(-9, 9))
WORDS = st.one_of(st.integers(-5, 4), st.tuples(INDEX, INDEX))


@given(st.lists(WORDS, min_size=1, max_size=3))
def test_parts_are_what_python_makes_of_them(words: list[int | tuple[int | None, int | None]]) -> None:
    values = torch.arange(5 * 6 * 7).reshape(5, 6, 7)
    text = ",".join(
        str(word) if isinstance(word, int) else ":".join("" if part is None else str(part) for part in word)
        for word in words
    )
    box, gone = parse_part(text, (5, 6, 7))
    part = values[box.indices]
    for dim in reversed(gone):
        part = part.select(dim, 0)
    expected = values[tuple(word if isinstance(word, int) else slice(*word) for word in words)]
    assert part.shape == expected.shape
    assert torch.equal(part, expected)


@pytest.fixture
def cut(tmp_path: Path) -> tuple[CheckpointFolder, torch.Tensor]:
    values = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    return builders.save_cut({"w": (values, builders.grid((40, 50), [10, 25], [20]))}, tmp_path / "a"), values


def test_only_the_chunks_that_are_needed_are_read(
    cut: tuple[CheckpointFolder, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, values = cut
    read: list[int] = []
    plain = CheckpointFolder.opened
    monkeypatch.setattr(
        CheckpointFolder, "opened", lambda self, span, *rest: read.append(span.offset) or plain(self, span, *rest)
    )
    found, _ = show(folder, "w", "12:14,:8")
    assert torch.equal(found, values[12:14, :8])
    assert read == [folder.tensors["w"].chunks[2].span.offset]


def test_objects_and_unknown_keys(tmp_path: Path) -> None:
    folder = builders.save({"model.layers.0.weight": torch.tensor(2.5), "options": {"lr": 0.1}}, tmp_path / "a")
    assert show(folder, "options.lr") == (0.1, None)
    scalar, _ = show(folder, "model.layers.0.weight")
    assert scalar.item() == 2.5
    with pytest.raises(CheckpointError, match=r"did you mean model\.layers\.0\.weight"):
        show(folder, "model.layers.0.wieght")
    with pytest.raises(ConfigurationError, match="is an object"):
        show(folder, "options.lr", "0")


# ---- checkpoints of this library's training --------------------------------------------------------------------------

MODEL, STRATEGY = "odd_shapes", 3


def save(root: str) -> None:
    model, optimizer = wrap(MODEL, STRATEGY, 0)
    step(model, optimizer, 1, MODEL_CASES[MODEL])
    save_checkpoint(model, optimizer, root, iteration=5)


def resave(source: str, root: str) -> None:
    """What one checkpoint holds, saved by other ranks."""
    model, optimizer = wrap(MODEL, STRATEGY, 3)
    load_checkpoint(model, optimizer, source)
    save_checkpoint(model, optimizer, root, iteration=5)


def load(roots: list[str]) -> list[dict[str, torch.Tensor]]:
    model, optimizer = wrap(MODEL, STRATEGY, 3)
    found = []
    for root in roots:
        load_checkpoint(model, optimizer, root)
        found.append(contents(model, optimizer)[0])
    return found


def test_our_own_checkpoints(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(3, save, str(tmp_path / "three"))
    run_ranks(1, resave, str(tmp_path / "three"), str(tmp_path / "one"))
    three, one = CheckpointFolder(locate(tmp_path / "three")), CheckpointFolder(locate(tmp_path / "one"))

    found = inspect_folder(three)
    assert (found["format"], found["optimizer"], found["has_manifest"]) == ("fsdp_dtensor", "per_parameter", True)
    assert found["common"]["iteration"] == 5
    assert found["problems"] == []
    assert any(entry["chunks"] > 1 for entry in found["entries"])
    compared = diff(three, one, pattern=r"^(model|optimizer\.state)\.")
    assert compared.is_same
    assert compared.compared == sum(
        entry["key"].startswith(("model.", "optimizer.state.")) for entry in found["entries"]
    )

    back = tmp_path / "back" / "iter_0000005"
    dcp_to_torch_save(three.path, tmp_path / "all.pt")  # torch's own converters read and write what we do
    torch_save_to_dcp(tmp_path / "all.pt", back)
    assert diff(three, CheckpointFolder(back), pattern=r"^(model|optimizer\.state)\.").is_same
    assert "optimizer.param_groups.0.lr" in CheckpointFolder(back).objects

    roots = [str(root) for root in (tmp_path / "three", back.parent)]
    for wanted, *others in run_ranks(2, load, roots):
        for loaded in others:
            assert_equal_tensors(loaded, wanted)
