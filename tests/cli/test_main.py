"""The `mfsdp` command imports what the command line asks for, and nothing else."""

import subprocess
import sys

import pytest

from megatron_fsdp.cli.main import main
from tests.support.source_tree import ROOT, SOURCE

COMMANDS = ("train", "plan", "doctor", "describe", "trace", "hang", "checkpoint", "docs")


def test_help_names_every_command_and_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from megatron_fsdp.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "assert not {'torch', 'numpy', 'rich', 'matplotlib'} & sys.modules.keys(), 'slow to import'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"\n    {command}" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code
    assert f"mfsdp {command}" in capsys.readouterr().out


def test_a_misspelled_command_is_refused_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doktor"])
    assert ended.value.code == 2
    assert "did you mean doctor?" in capsys.readouterr().err


def test_pages_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs", "debugging"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    assert main(["docs"]) == 0
    assert "debugging\ndesign\n" in capsys.readouterr().out
    assert main(["docs", "debuging"]) == 2
    assert capsys.readouterr().err == "error: there is no page 'debuging'; did you mean 'debugging'?\n"
