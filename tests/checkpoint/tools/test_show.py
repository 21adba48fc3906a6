"""Parts of tensors, read from the chunks that hold them and no others."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megatron_fsdp.checkpoint.checksum import checksum_box
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.tools.show import ShownObject, ShownTensor, parse_part, show
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.checkpoint.tools import builders

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
    part = values[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]
    for dim in reversed(gone):
        part = part.select(dim, 0)
    expected = values[tuple(word if isinstance(word, int) else slice(*word) for word in words)]
    assert part.shape == expected.shape
    assert torch.equal(part, expected)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1,2,3", "has 3 dimensions"),
        ("x", "cannot take 'x'"),
        ("0:4:2", "steps"),
        ("4", "no index 4"),
        (",", "cannot take"),
    ],
)
def test_parts_that_do_not_fit_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parse_part(text, (4, 4))


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
    found = show(folder, "w", "12:14,:8")
    assert isinstance(found, ShownTensor)
    assert torch.equal(found.values, values[12:14, :8])
    assert read == [folder.tensors["w"].chunks[2].span.offset]


def test_a_large_tensor_is_shown_by_its_corner(cut: tuple[CheckpointFolder, torch.Tensor]) -> None:
    folder, values = cut
    found = show(folder, "w")
    assert isinstance(found, ShownTensor)
    assert found.box.lengths == (6, 6)
    assert torch.equal(found.values, values[:6, :6])


def test_checksums_do_not_depend_on_the_cut(cut: tuple[CheckpointFolder, torch.Tensor]) -> None:
    folder, values = cut
    for part, expected in ((None, values), ("5:30,10:45", values[5:30, 10:45]), ("-1", values[-1:])):
        found = show(folder, "w", part, with_hash=True)
        assert isinstance(found, ShownTensor)
        assert found.checksum == f"{checksum_box(expected, (0, 0), tuple(expected.shape)):016x}"


def test_objects_and_unknown_keys(tmp_path: Path) -> None:
    folder = builders.save({"model.layers.0.weight": torch.tensor(2.5), "options": {"lr": 0.1}}, tmp_path / "a")
    found = show(folder, "options.lr")
    assert isinstance(found, ShownObject)
    assert found.value == 0.1
    scalar = show(folder, "model.layers.0.weight")
    assert isinstance(scalar, ShownTensor)
    assert scalar.values.item() == 2.5
    with pytest.raises(CheckpointError, match=r"did you mean model\.layers\.0\.weight"):
        show(folder, "model.layers.0.wieght")
    with pytest.raises(ConfigurationError, match="is an object"):
        show(folder, "options.lr", "0")
