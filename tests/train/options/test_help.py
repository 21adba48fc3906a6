"""The help of the trainer: complete and grouped."""

import re

import pytest

from megatron_fsdp.cli.main import main
from megatron_fsdp.config.ddp_config_flags import flag_of
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options import OPTIONS, SECTIONS
from megatron_fsdp.train.options.command_line import make_parser, parse_options
from megatron_fsdp.train.options.megatron_flags import ALIASES, FIXED


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    return make_parser().format_help()


def test_every_flag_stands_in_it_once_in_the_group_of_its_section(text: str) -> None:
    shown = re.findall(r"^  (--\S+)", text, flags=re.MULTILINE)
    flags = [flag.rstrip(",") for flag in shown]
    fields = [flag_of(name) for name in DistributedDataParallelConfig.__dataclass_fields__]
    options = [option.flag for option in OPTIONS.values()]
    expected = ["--config", "--preset", *options, *fields, *ALIASES, *FIXED]
    assert sorted(flags) == sorted(expected)
    assert re.findall(r"^(\S.*):$", text, flags=re.MULTILINE) == [
        "options",
        "where to begin",
        *SECTIONS,
        "data parallelism",
        "other spellings",
        "of Megatron-LM, with one possible value",
    ]


def test_help_ends_well_and_a_wrong_flag_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    assert "--use-megatron-fsdp, --no-use-megatron-fsdp" in capsys.readouterr().out
    assert main(["train", "--use-megatron-fsd"]) == 2
    assert capsys.readouterr().err == (
        "error: there is no flag --use-megatron-fsd; did you mean --use-megatron-fsdp?\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--lr", "argument --lr: expected one argument"),
        ("stray", "'stray' belongs to no flag: leave it out"),
        ("--data-parallel-sharding-strategy zero9", "invalid choice: 'zero9'"),
        ("--preset huge", "invalid choice: 'huge'"),
        ("--zero-stage 3", "there is no flag --zero-stage"),
        ("--learning-rate 1e-3", "there is no flag --learning-rate; did you mean --lr?"),
        ("--output_dir=x", "there is no flag --output_dir=x; did you mean --save?"),
        ("--micro-batch 2", "there is no flag --micro-batch; did you mean --micro-batch-size?"),
        ("--swiglu=true", "argument --swiglu/--no-swiglu: takes no value, and 'true' was given"),
        ("--data-path 0.3 a 0.7 b", "'a' belongs to no flag: leave it out, since --data-path takes one place"),
    ],
)
def test_unreadable_words_are_refused_in_one_line(words: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_options(words.split())
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
