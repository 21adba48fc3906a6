"""What `--data-path` may name, and the documents in it."""

import json
import os
from pathlib import Path

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data import preparation
from megatron_fsdp.train.data.preparation import Source, Texts, find_source


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def names(source: Source) -> list[str]:
    return [path.relative_to(source.root).as_posix() for path in source.files]


def test_files_come_in_sorted_order_without_hidden_and_skipped_folders_and_links_to_nothing(tmp_path: Path) -> None:
    kept = {"b.py": b"b", "a.txt": b"aa", "z/c.md": b"c"}
    write_files(tmp_path, {**kept, ".git/x": b"x", "__pycache__/y.py": b"y", "m/.hidden": b"h"})
    (tmp_path / "link").symlink_to("nowhere")
    found = find_source(tmp_path)
    assert names(found) == ["a.txt", "b.py", "z/c.md"]
    assert found.size == 4


def test_what_is_neither_a_file_nor_a_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="pipe is a device, pipe or socket: give a file or a folder"):
        find_source(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="--data-path no/such/place does not exist: give a text file"):
        find_source(Path("no/such/place"))


@pytest.mark.parametrize("said", ["ids.part", "ids.part.bin", "ids.part.idx"])
def test_a_pair_is_found_by_prefix_or_either_file(tmp_path: Path, said: str) -> None:
    write_files(tmp_path, {"ids.part.bin": b"", "ids.part.idx": b""})
    expected = Source("indexed", tmp_path / "ids.part", (tmp_path / "ids.part.bin", tmp_path / "ids.part.idx"))
    assert find_source(tmp_path / said) == expected


@pytest.mark.parametrize("marks", [["dataset_dict.json"], ["state.json", "dataset_info.json"]])
def test_a_saved_data_set_is_known_by_its_files(tmp_path: Path, marks: list[str]) -> None:
    write_files(tmp_path, dict.fromkeys((*marks, "train/data.arrow"), b"{}"))
    source = find_source(tmp_path)
    assert source.kind == "dataset"
    assert names(source) == sorted([*marks, "train/data.arrow"])
    (tmp_path / marks[-1]).unlink()  # half the marks
    assert find_source(tmp_path).kind == "texts"


def test_links_to_folders_are_followed_and_each_folder_is_entered_once(tmp_path: Path) -> None:
    write_files(tmp_path, {"sources/a": b"", "sources/in/b": b"", "elsewhere/c": b""})
    sources = tmp_path / "sources"
    for name, target in {"away": "elsewhere", "circle": "sources", "in/up": "sources", "same": "sources/in"}.items():
        (sources / name).symlink_to(tmp_path / target, target_is_directory=True)
    assert names(find_source(sources)) == ["a", "away/c", "in/b"]


def test_what_earlier_runs_left_is_no_text_to_learn(tmp_path: Path) -> None:
    run, saved = "runs/old/", "saved/iter_0000010/"
    left = [f"{run}applied.json", f"{run}metrics.jsonl", f"{run}tokens-1/tokens.json"]
    left += [f"{saved}.metadata", f"{saved}common.json", "saved/latest_checkpointed_iteration.txt"]
    left += [f"cache/tokens-2/{name}" for name in ("tokens.json", "tokens.bin")]
    kept = ["a.txt", "iter_0000010/b", "saved/note.txt", "tokens-3/a.json"]
    write_files(tmp_path, dict.fromkeys([*left, *kept], b""))
    assert sorted(names(find_source(tmp_path))) == sorted(kept)
    assert "metrics.jsonl" in names(find_source(tmp_path / "runs" / "old"))  # asked for by name


def read(path: Path, key: str = "text") -> list[str]:
    return texts_of(Texts(find_source(path), key))


def texts_of(texts: Texts) -> list[str]:
    """Whole documents of the pieces."""
    found, pieces = [], []
    for piece, is_last in texts:
        pieces.append(piece)
        if is_last:
            found.append("".join(pieces))
            pieces = []
    assert pieces == []
    return found


def save_dataset(folder: Path, rows: dict[str, list[object]], parts: tuple[str, ...] = ()) -> None:
    import datasets

    datasets.disable_progress_bars()
    if not parts:
        datasets.Dataset.from_dict(rows).save_to_disk(str(folder))
        return
    made = {part: datasets.Dataset.from_dict({**rows, "part": [part] * len(rows["text"])}) for part in parts}
    datasets.DatasetDict(made).save_to_disk(str(folder))


def test_every_text_file_is_a_document_and_others_are_counted(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": b"good \xc3\xa9\r\nx", "b": b"\xff\xfe\xfd", "c": b"nul\0byte", "d": b""})
    os.mkfifo(tmp_path / "e.jsonl")  # never waited for
    documents = Texts(find_source(tmp_path), "text")
    for _ in range(2):  # skipped are those of the last time, not of both
        assert texts_of(documents) == ["good é\r\nx"]
        assert [path.name for path in documents.skipped] == ["b", "c", "e.jsonl"]


def test_a_single_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="a is no UTF-8 text: give a text file, or token ids"):
        read(tmp_path / "a")


def test_long_files_come_in_pieces_that_end_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "PIECE", 8)
    (tmp_path / "a").write_text("0123456789\nab\ncd\nefghijklmnopqrstuvwxyz0123456789")
    pieces, ends = zip(*Texts(find_source(tmp_path), "text"), strict=True)
    assert "".join(pieces) == (tmp_path / "a").read_text()
    assert pieces[0] == "0123456789\n"
    assert max(map(len, pieces)) == 16
    assert [*ends] == [False] * (len(pieces) - 1) + [True]


def test_json_lines_give_their_field_and_blank_lines_nothing(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": "é\n", "body": "x"}),
        "",
        '{"text": "one\\u0000two a\\ud83d b"}',
        '{"text": "\\ud83d\\ude00"}',
    ]
    (tmp_path / "a.JSONL").write_text("\n".join(lines))
    assert read(tmp_path) == read(tmp_path / "a.JSONL") == ["é\n", "one\ufffdtwo a? b", "😀"]
    (tmp_path / "a.JSONL").write_text(lines[0])
    assert read(tmp_path / "a.JSONL", "body") == ["x"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a"', r"line 2 of .*a\.jsonl is not JSON"),
        ("[" * 100_000, r"line 2 of .*a\.jsonl is not JSON \(maximum recursion depth"),
        ("[1]", r"line 2 of .*a\.jsonl has no text in the field 'text': give --json-key with a field that holds text"),
        ('{"body": "a"}', r"line 2 of .*a\.jsonl has no text in the field 'text': give --json-key with one of 'body'"),
        ('{"text": 3}', r"line 2 of .*no text in the field 'text': give --json-key with a field that holds text"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match=said):
        read(tmp_path)


def test_a_saved_data_set_gives_its_column(tmp_path: Path) -> None:
    save_dataset(tmp_path / "set", {"text": [f"t{i}" for i in range(300)] + [None], "n": list(range(301))})
    assert read(tmp_path / "set") == [f"t{i}" for i in range(300)]
    assert Texts(find_source(tmp_path / "set"), "text").size >= sum(len(f"t{i}") for i in range(300))
