"""The list of all that users can call has arguments of functions, and options of commands inside of commands."""

import json
from pathlib import Path

import pytest

from tools import public_surface


def test_names_come_with_their_arguments() -> None:
    names = public_surface.names_of(".fully_shard")
    assert "megatron_fsdp.fully_shard.fully_shard_model(zero_dp_strategy=)" in names
    assert "megatron_fsdp.fully_shard.MegatronFSDP.clip_grad_norm_" in names


def test_what_is_gone_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.json"
    before.write_text(json.dumps(["mfsdp hang", "mfsdp dance"]))
    monkeypatch.setattr(public_surface, "names_of", lambda _module: [])
    monkeypatch.setattr(public_surface, "commands", lambda: ["mfsdp hang", "mfsdp sing"])
    monkeypatch.setattr("sys.argv", ["public_surface.py", "--against", str(before)])
    assert public_surface.main() == 1
    assert capsys.readouterr().out.split("\n")[:3] == [
        "gone  mfsdp dance",
        "new   mfsdp sing",
        "2 before, 2 now: 1 gone, 1 new",
    ]
