import json
import os
import sys
from pathlib import Path

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data import texts
from megatron_fsdp.train.data.sources import find_source
from megatron_fsdp.train.data.texts import Documents, dataset_bytes, is_json_lines, is_text, pieces_of


def read(path: Path, key: str = "text") -> list[str]:
    source = find_source(path)
    assert not hasattr(source, "is_indexed")
    return ["".join(document) for document in Documents(source, key)]


def save_dataset(folder: Path, rows: dict[str, list[object]], parts: tuple[str, ...] = ()) -> None:
    import datasets

    datasets.disable_progress_bars()
    if not parts:
        datasets.Dataset.from_dict(rows).save_to_disk(str(folder))
        return
    made = {part: datasets.Dataset.from_dict({**rows, "part": [part] * len(rows["text"])}) for part in parts}
    datasets.DatasetDict(made).save_to_disk(str(folder))


def test_every_text_file_is_a_document_and_others_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"good \xc3\xa9\r\nx")
    (tmp_path / "b").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "c").write_bytes(b"nul\0byte")
    (tmp_path / "d").write_bytes(b"")
    source = find_source(tmp_path)
    assert not hasattr(source, "is_indexed")
    documents = Documents(source, "text")
    assert ["".join(document) for document in documents] == ["good é\r\nx", ""]
    assert [path.name for path in documents.skipped] == ["b", "c"]
    assert not documents.uses_key
    assert len(list(documents)) == 2
    assert len(documents.skipped) == 2  # of the last time, not of both


def test_pipes_and_links_to_nothing_are_counted_and_never_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("good")
    os.mkfifo(tmp_path / "b.jsonl")
    (tmp_path / "c.json").symlink_to("nowhere")
    source = find_source(tmp_path)
    assert not hasattr(source, "is_indexed")
    documents = Documents(source, "text")
    assert ["".join(document) for document in documents] == ["good"]
    assert [path.name for path in documents.skipped] == ["b.jsonl", "c.json"]


def test_a_nul_of_json_does_not_end_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one\\u0000two"}\n')
    assert read(tmp_path / "a.jsonl") == ["one\N{REPLACEMENT CHARACTER}two"]


def test_json_lines_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{tmp_path} cannot be read .Is a directory.: mend it"):
        list(texts.json_texts(tmp_path, "text"))


def test_a_single_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="a is no UTF-8 text: give a text file, or token ids"):
        read(tmp_path / "a")


def test_long_files_come_in_pieces_that_end_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 8)
    (tmp_path / "a").write_text("0123456789\nab\ncd\nefghijklmnopqrstuvwxyz0123456789")
    pieces = list(texts.file_pieces(tmp_path / "a"))
    assert "".join(pieces) == (tmp_path / "a").read_text()
    assert pieces[0] == "0123456789\n"
    assert max(map(len, pieces)) == 16


def test_bad_bytes_far_into_a_file_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 4)
    (tmp_path / "a").write_bytes(b"a" * 30000 + b"\xff")
    (tmp_path / "b").write_bytes(b"a" * 30000)
    assert (is_text(tmp_path / "a"), is_text(tmp_path / "b"), is_text(tmp_path / "none")) == (False, True, False)


@pytest.mark.parametrize("text", ["", "abc", "a" * 50, "ab\n" * 20, "0123456789ab\n" + "c" * 40 + "\nd"])
def test_texts_in_memory_are_cut_and_lose_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 10)
    pieces = list(pieces_of(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 21 for piece in pieces)


def test_json_lines_give_their_field_and_blank_lines_nothing(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "é\n", "n": 1}), "", json.dumps({"text": "b"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read(tmp_path / "a.jsonl") == ["é\n", "b"]
    assert read(tmp_path) == ["é\n", "b"]


def test_json_key_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "b", "text": "t"}\n')
    assert read(tmp_path, "body") == ["b"]


def test_a_json_file_is_lines_only_where_it_begins_with_one(tmp_path: Path) -> None:
    (tmp_path / "lines.json").write_text('{"text": "t"}\n{"text": "u"}\n')
    (tmp_path / "whole.json").write_text('{\n  "text": "t"\n}\n')
    (tmp_path / "list.json").write_text("[1, 2]\n")
    kinds = [is_json_lines(tmp_path / name) for name in ("lines.json", "whole.json", "list.json")]
    assert kinds == [True, False, False]
    assert read(tmp_path / "lines.json") == ["t", "u"]
    assert read(tmp_path / "whole.json") == ['{\n  "text": "t"\n}\n']
    assert read(tmp_path / "list.json") == ["[1, 2]\n"]


def test_the_ends_of_names_may_be_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "a.JSONL").write_text('{"text": "t"}\n{"text": "u"}\n')
    (tmp_path / "b.JSON").write_text('{"text": "v"}\n')
    assert read(tmp_path) == ["t", "u", "v"]


def test_a_json_array_gives_its_texts(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\n[\n  {"text": "t", "n": 1},\n  {"text": "\\ud83d"}\n]\n')
    (tmp_path / "b.json").write_text('["u", "v"]')
    (tmp_path / "c.json").write_text('["u", 1]')
    (tmp_path / "d.json").write_text('["u", ')
    assert read(tmp_path) == ["t", "\ufffd", "u", "v", '["u", 1]', '["u", ']
    with pytest.raises(
        ConfigurationError, match=r"object 1 of .*a\.json has no text in the field 'body': give .*'text'"
    ):
        read(tmp_path, "body")


def test_a_json_array_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_LARGEST_ARRAY", 9)
    (tmp_path / "a.json").write_text('["u", "v"]')
    with pytest.raises(ConfigurationError, match=r"a\.json begins as one JSON array, and its 10 bytes .* JSON lines"):
        read(tmp_path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\xef\xbb\xbf")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "t"}\n')
    assert read(tmp_path) == ["a\ufeff", "t"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a"', r"line 2 of .*a\.jsonl is not JSON"),
        ("[" * 100_000, r"line 2 of .*a\.jsonl is not JSON \(maximum recursion depth"),
        ("[1]", r"line 2 of .*a\.jsonl is list and no object: give objects with a field 'text'"),
        ('{"body": "a"}', r"line 2 of .*a\.jsonl has no text in the field 'text': give --json-key with one of 'body'"),
        ('{"text": 3}', r"line 2 of .*no text in the field 'text': give --json-key with a field that holds text"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n' + line + "\n")
    with pytest.raises(ConfigurationError, match=said):
        read(tmp_path)


def test_halves_of_characters_in_json_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert read(tmp_path) == ["a\ufffd b", "😀"]


def test_a_saved_data_set_gives_its_column(tmp_path: Path) -> None:
    save_dataset(tmp_path / "set", {"text": [f"t{i}" for i in range(300)] + [None], "n": list(range(301))})
    assert read(tmp_path / "set") == [f"t{i}" for i in range(300)]
    assert dataset_bytes(tmp_path / "set", "text") >= sum(len(f"t{i}") for i in range(300))


def test_of_several_parts_train_is_read(tmp_path: Path) -> None:
    save_dataset(tmp_path / "set", {"text": ["a"]}, ("test", "train"))
    assert read(tmp_path / "set", "part") == ["train"]
    save_dataset(tmp_path / "one", {"text": ["a"]}, ("other",))
    assert read(tmp_path / "one", "part") == ["other"]


def test_parts_without_train_and_columns_without_text_are_refused(tmp_path: Path) -> None:
    save_dataset(tmp_path / "set", {"text": ["a"], "n": [1]}, ("left", "right"))
    with pytest.raises(ConfigurationError, match="has the parts left, right and none is called train: give the folder"):
        read(tmp_path / "set")
    with pytest.raises(ConfigurationError, match="no text in a column 'n': give --json-key with one of 'text', 'part'"):
        read(tmp_path / "set" / "left", "n")
    with pytest.raises(ConfigurationError, match="no text in a column 'body'"):
        read(tmp_path / "set" / "left", "body")


def test_without_the_package_a_data_set_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigurationError,
        match=r"needs the package datasets, which is not installed; run .*, or give text",
    ):
        read(tmp_path)


def test_a_data_set_without_rows_is_refused(tmp_path: Path) -> None:
    save_dataset(tmp_path / "none", {"text": []})
    with pytest.raises(ConfigurationError, match=r"cannot be read by `datasets` .*, as where it has no rows"):
        read(tmp_path / "none")


def test_a_damaged_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="cannot be read by `datasets`"):
        read(tmp_path)
