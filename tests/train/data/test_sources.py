import os
import sysconfig
from pathlib import Path

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.prepared import SIDE_FILE
from megatron_fsdp.train.data.sources import (
    LIBRARY_BYTES,
    SavedDataset,
    TextFiles,
    TokenIds,
    find_source,
    is_of_a_run,
    listing,
    walk,
)
from megatron_fsdp.train.reporting.applied import APPLIED_FILE
from megatron_fsdp.train.results import MARK_FILE, SUMMARY_FILE


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def names(source: object) -> list[str]:
    assert isinstance(source, TextFiles | SavedDataset | TokenIds)
    return [path.relative_to(source.root).as_posix() for path in source.files]


def test_files_come_in_sorted_order_without_hidden_and_skipped_folders(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        {"b.py": b"b", "a.txt": b"a", "z/c.md": b"c", ".git/x": b"x", "__pycache__/y.py": b"y", "m/.hidden": b"h"},
    )
    assert names(find_source(tmp_path)) == ["a.txt", "b.py", "z/c.md"]


def test_what_a_run_writes_is_not_what_it_reads(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.txt": b"a", "runs/now/metrics.jsonl": b"{}", "runs/old/note": b"n"})
    assert names(find_source(tmp_path, [tmp_path / "runs" / "now"])) == ["a.txt", "runs/old/note"]


def test_a_link_to_nothing_has_no_size_and_no_time(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("nowhere")
    assert listing(find_source(tmp_path)) == [(str(tmp_path / "a"), -1, -1)]


def test_what_is_neither_a_file_nor_a_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="pipe is a device, pipe or socket: give a file or a folder"):
        find_source(tmp_path / "pipe")


def test_default_is_the_standard_library_without_tests() -> None:
    source = find_source(None)
    assert source.root == Path(sysconfig.get_paths()["stdlib"])
    found = names(source)
    assert "argparse.py" in found
    assert not any("site-packages" in name or name.startswith("test/") or not name.endswith(".py") for name in found)
    assert sum(size for _, size, _ in listing(source)) <= LIBRARY_BYTES == 24 * 1024**2


def test_default_has_whole_files_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"a.py": b"123456", "b.py": b"12345", "c.py": b"1234", "d.txt": b"1"})
    monkeypatch.setattr("megatron_fsdp.train.data.sources.LIBRARY_BYTES", 10)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert names(find_source(None)) == ["a.py", "c.py"]


def test_a_folder_of_the_user_has_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"a.py": b"123456", "b.txt": b"123456"})
    monkeypatch.setattr("megatron_fsdp.train.data.sources.LIBRARY_BYTES", 1)
    assert names(find_source(tmp_path)) == ["a.py", "b.txt"]


def test_missing_path_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="--data-path no/such/place does not exist: give a text file"):
        find_source(Path("no/such/place"))


@pytest.mark.parametrize("said", ["ids.part", "ids.part.bin", "ids.part.idx"])
def test_a_pair_is_found_by_prefix_or_either_file(tmp_path: Path, said: str) -> None:
    write_files(tmp_path, {"ids.part.bin": b"", "ids.part.idx": b""})
    expected = TokenIds(tmp_path / "ids.part", (tmp_path / "ids.part.bin", tmp_path / "ids.part.idx"), is_indexed=True)
    assert find_source(tmp_path / said) == expected


def test_an_npy_is_token_ids_and_another_file_is_text(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.npy": b"", "a.txt": b""})
    assert find_source(tmp_path / "a.npy") == TokenIds(tmp_path / "a.npy", (tmp_path / "a.npy",), is_indexed=False)
    assert find_source(tmp_path / "a.txt") == TextFiles(tmp_path / "a.txt", (tmp_path / "a.txt",))


@pytest.mark.parametrize("marks", [["dataset_dict.json"], ["state.json", "dataset_info.json"]])
def test_a_saved_data_set_is_known_by_its_files(tmp_path: Path, marks: list[str]) -> None:
    write_files(tmp_path, dict.fromkeys((*marks, "train/data.arrow"), b"{}"))
    source = find_source(tmp_path)
    assert isinstance(source, SavedDataset)
    assert names(source) == sorted([*marks, "train/data.arrow"])


def test_half_the_marks_are_a_folder_of_text(tmp_path: Path) -> None:
    write_files(tmp_path, {"state.json": b"{}"})
    assert isinstance(find_source(tmp_path), TextFiles)


def test_listing_changes_with_size_and_time(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": b"abc"})
    os.utime(tmp_path / "a", ns=(0, 1_000_000_000))
    assert listing(find_source(tmp_path)) == [(str(tmp_path / "a"), 3, 1_000_000_000)]


def test_a_file_that_went_away_is_refused(tmp_path: Path) -> None:
    gone = TextFiles(tmp_path, (tmp_path / "gone",))
    with pytest.raises(ConfigurationError, match="gone cannot be read"):
        listing(gone)


def test_walk_enters_what_it_is_not_told_to_skip(tmp_path: Path) -> None:
    write_files(tmp_path, {"site-packages/a": b"", "b": b""})
    assert [path.name for path in walk(tmp_path, skipped=frozenset())] == ["b", "a"]


def test_links_to_folders_are_followed_and_each_folder_is_entered_once(tmp_path: Path) -> None:
    write_files(tmp_path, {"texts/a": b"", "texts/in/b": b"", "elsewhere/c": b"", "out/d": b""})
    texts = tmp_path / "texts"
    for name, target in {
        "away": "elsewhere",
        "circle": "texts",
        "in/up": "texts",
        "same": "texts/in",
        "to": "out",
    }.items():
        (texts / name).symlink_to(tmp_path / target, target_is_directory=True)
    assert names(find_source(texts, [tmp_path / "out"])) == ["a", "away/c", "in/b"]


def test_what_earlier_runs_left_is_no_text_to_learn(tmp_path: Path) -> None:
    run, saved = "runs/old/", "saved/iter_0000010/"
    left = [f"{run}applied.json", f"{run}metrics.jsonl", f"{run}train.log", f"{run}tokens-1/data.json"]
    left += [f"{saved}.metadata", f"{saved}common.json", "saved/latest_checkpointed_iteration.txt"]
    left += [f"cache/tokens-2/{name}" for name in ("data.json", "training.bin", "training.idx")]
    kept = ["a.txt", "other/applied.json", "iter_0000010/b", "saved/note.txt", "tokens-3/data.json"]
    write_files(tmp_path, dict.fromkeys([*left, *kept], b""))
    source = find_source(tmp_path)
    assert isinstance(source, TextFiles)
    assert sorted(names(source)) == sorted(kept)
    found = [path.relative_to(tmp_path).as_posix() for path in source.left_out]
    assert found == ["cache/tokens-2", "runs/old", "saved/iter_0000010"]
    assert "metrics.jsonl" in names(find_source(tmp_path / "runs" / "old"))  # asked for by name


def test_the_marks_of_results_are_what_a_run_writes() -> None:
    assert is_of_a_run("x", [APPLIED_FILE, MARK_FILE])
    assert is_of_a_run("tokens-x", [SIDE_FILE, "training.bin", "training.idx"])
    assert is_of_a_run("x", [APPLIED_FILE, SUMMARY_FILE])  # of a run that took no step
    assert not is_of_a_run("x", [MARK_FILE])
