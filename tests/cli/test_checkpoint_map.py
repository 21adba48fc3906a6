"""`map`, under both names: the JSON file and what is printed."""

import json
from pathlib import Path

import pytest

from megatron_fsdp.cli.checkpoint import inspector
from tests.checkpoint.tools import builders

NAMES = {
    "module.module.embedding.word_embeddings.weight": 0,
    "module.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": 1,
}
MAP = {
    "model.module.embedding.word_embeddings.weight": 0,
    "model.module.decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": 1,
}


@pytest.mark.parametrize("command", ["map", "print-torch-dcp-in-json"])
def test_the_map_is_written_into_the_folder_and_printed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    builders.save(NAMES, tmp_path / "map")
    assert inspector([command, str(tmp_path / "map")]) == 0
    path = tmp_path / "map" / "param_to_param_group_map.json"
    assert json.loads(path.read_text()) == MAP
    content, place = capsys.readouterr().out.splitlines()
    assert json.loads(content.removeprefix("torch dcp content: ")) == MAP
    assert place == str(path)


def test_place_and_prefix_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    builders.save({"module.w": 2}, tmp_path / "map")
    assert inspector(["map", str(tmp_path / "map"), "--out", str(tmp_path / "m.json"), "--model-prefix", "m"]) == 0
    assert json.loads((tmp_path / "m.json").read_text()) == {"m.w": 2}
    assert inspector(["map", str(tmp_path / "none")]) == 2
