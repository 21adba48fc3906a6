"""The convert command: the words of the user guide, exit statuses, what is printed, and what is written."""

import json
from pathlib import Path

import pytest

from megatron_fsdp.checkpoint.convert.groups import export_group_map_json
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.cli import checkpoint
from megatron_fsdp.cli.main import main as mfsdp
from tests.support.real_torchrun import real_torchrun
from tests.support.torch_dist import GptSpec, group_map, make_truth, write_torch_dist

SPEC = GptSpec()
META = "optimizer.param_to_group_meta.module.module.module"


def main(words: list[str]) -> int:
    """What `mfsdp checkpoint` ends with."""
    return mfsdp(["checkpoint", *words])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_torch_dist(tmp_path / "iter_0000007", make_truth(SPEC))


def gated_keys(folder: Path) -> int:
    return sum(key.endswith("linear_fc1.weight_w") for key in CheckpointFolder(folder).tensors)


def test_the_commands_of_the_guide(source: Path, tmp_path: Path) -> None:
    dumped = {f"module.module.{name}": 1 - index for name, index in group_map(SPEC).items()}
    save_alone(dumped, checkpoint_id=tmp_path / "map")
    written = export_group_map_json(tmp_path / "map")
    words = ["convert-torch-dist-to-fsdp-dtensor", "--swiglu", str(source), str(tmp_path / "out")]
    assert main([*words, "--param-to-param-group-map-json", str(written)]) == 0
    folder = CheckpointFolder(tmp_path / "out")
    assert folder.read_object(f"{META}.output_layer.weight.weight_decay") == 0.0  # as the map says, swapped
    assert gated_keys(tmp_path / "out") == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--swiglu", "none", "SRC", "DST"], 0),
        (["--swiglu=all", "SRC", "DST"], 2),
        (["--swiglu-modules", "decoder", "SRC", "DST"], 2),
    ],
)
def test_swiglu_stands_alone_or_with_a_scope(source: Path, tmp_path: Path, words: list[str], expected: int) -> None:
    places = {"SRC": str(source), "DST": str(tmp_path / "out")}
    assert main(["convert", *(places.get(word, word) for word in words)]) == 0
    assert gated_keys(tmp_path / "out") == expected


def test_defect_17_a_dry_run_writes_nothing_and_tells_every_move(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), str(tmp_path / "out"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "decoder.layers.mlp.linear_fc1: gated (args.swiglu is True)" in told
    line = "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight [1:2, 12:24, 0:8] -> "
    assert f"{line}model.module.decoder.layers.1.mlp.linear_fc1.weight_v [12, 8]" in told
    assert "would write 51 tensors" in told
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007"]


def test_defect_17_json_tells_scripts_what_was_done(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), str(tmp_path / "out"), "--json", "--verify"]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["written"], told["verified"], told["ranks"]) == (True, True, 1)
    assert told["tensors"] == len(told["moves"])
    assert printed.err == ""


def test_defect_17_failures_have_an_exit_status(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for words, message in {
        (str(tmp_path / "nowhere"), str(tmp_path / "out")): "is not a folder",
        (str(source), str(tmp_path / "full")): "exists already and is not empty",
        (str(source), str(source)): "is the checkpoint that is read",
        (str(source), str(source / "sub")): "is inside",
        (str(source), str(tmp_path / "out"), "--groups", "map"): "needs --param-to-param-group-map-json",
        (
            str(source),
            str(tmp_path / "out"),
            "--param-to-param-group-map-json",
            str(tmp_path / "no"),
        ): "cannot read the map",
    }.items():
        assert main(["convert", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

    def differ(*_: object) -> None:
        raise checkpoint.ConversionMismatchError("they differ")

    monkeypatch.setattr(checkpoint, "convert", differ)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 1


def test_defect_17_the_tracker_is_written_on_request(source: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert main(["convert", str(source), str(runs / "iter_0000007")]) == 0
    assert [path.name for path in runs.iterdir()] == ["iter_0000007"]
    again = tmp_path / "again"
    assert main(["convert", str(source), str(again / "iter_0000007"), "--write-tracker"]) == 0
    assert (again / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert main(["convert", str(source), str(tmp_path / "other" / "release"), "--write-tracker"]) == 0
    assert (tmp_path / "other" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_a_tracker_to_a_folder_of_another_name_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(source), str(tmp_path / "runs" / "mine"), "--write-tracker"]) == 2
    assert "has to be named iter_0000007" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "mine").exists()


@pytest.mark.full
def test_defect_16_the_program_itself_runs_under_torchrun(source: Path, tmp_path: Path) -> None:
    words = ["-m", "megatron_fsdp.cli", "checkpoint", "convert-torch-dist-to-fsdp-dtensor", "--swiglu"]
    assert json.loads(real_torchrun([*words, str(source), str(tmp_path / "out"), "--json"]))["ranks"] == 2
    assert len(CheckpointFolder(tmp_path / "out").files) == 2
