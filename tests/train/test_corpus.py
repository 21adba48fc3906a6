import sysconfig
from pathlib import Path

import pytest
from megatron_fsdp.train.corpus import (
    MAX_CORPUS_BYTES,
    Source,
    find_source,
    is_held_out,
    list_files,
    load_corpus,
    split_texts,
)

from megatron_fsdp.errors import ConfigurationError


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def names(folder: Path, source: Source) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in list_files(source)]


def test_files_come_in_sorted_order_without_hidden_and_skipped_folders(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {"b.py": b"b", "a.txt": b"a", "z/c.md": b"c", ".git/x": b"x", "__pycache__/y.py": b"y", "m/.hidden": b"h"},
    )
    assert names(tmp_path, Source(tmp_path)) == ["a.txt", "b.py", "z/c.md"]


def test_suffixes_choose_files(tmp_path: Path) -> None:
    write_files(tmp_path, {"b.py": b"b", "a.txt": b"a"})
    assert names(tmp_path, Source(tmp_path, suffixes=(".py",))) == ["b.py"]


def test_default_source_is_the_standard_library_without_tests() -> None:
    source = find_source(None)
    assert source.path == Path(sysconfig.get_paths()["stdlib"])
    found = names(source.path, source)
    assert "argparse.py" in found
    assert not any("site-packages" in name or name.startswith("test/") or not name.endswith(".py") for name in found)


def test_missing_path_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="--data 'no/such/place' does not exist"):
        find_source("no/such/place")


def test_binary_and_empty_files_are_no_text(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": b"good \xc3\xa9", "b": b"\xff\xfe\xfd", "c": b"nul\0byte", "d": b""})
    corpus = load_corpus(Source(tmp_path))
    assert "".join(corpus.training + corpus.held_out) == "good é"


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": b"\xff\xfe"})
    with pytest.raises(ConfigurationError, match="holds no UTF-8 text"):
        load_corpus(Source(tmp_path))


def test_corpus_is_capped_and_a_cut_character_is_dropped(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": "éééé".encode()})  # 8 bytes; 5 bytes are two characters and a half
    corpus = load_corpus(Source(tmp_path / "a"), max_bytes=5)
    assert "".join(corpus.training + corpus.held_out) == "éé"
    assert MAX_CORPUS_BYTES == 24 * 1024**2


def test_training_and_held_out_texts_are_disjoint_and_complete() -> None:
    texts = tuple(f"text number {i}" for i in range(400))
    corpus = split_texts(texts)
    assert set(corpus.training) & set(corpus.held_out) == set()
    assert set(corpus.training) | set(corpus.held_out) == set(texts)
    assert 5 <= len(corpus.held_out) <= 40  # 5 % of 400 is 20


def test_split_depends_on_content_and_not_on_order() -> None:
    texts = tuple(f"text number {i}" for i in range(400))
    assert set(split_texts(texts).held_out) == set(split_texts(texts[::-1]).held_out)


def test_copies_of_a_text_lie_on_one_side() -> None:
    texts = tuple(f"text number {i % 50}" for i in range(100))
    corpus = split_texts(texts)
    assert set(corpus.training) & set(corpus.held_out) == set()
    assert len(corpus.training) % 2 == len(corpus.held_out) % 2 == 0


def test_end_of_a_single_text_is_held_out() -> None:
    corpus = split_texts(("0123456789" * 10,))
    assert (corpus.training, corpus.held_out) == (("0123456789" * 9 + "01234",), ("56789",))


def test_held_out_fraction_bounds_the_share() -> None:
    assert not is_held_out("anything", fraction=0.0)
    assert is_held_out("anything", fraction=1.0)
