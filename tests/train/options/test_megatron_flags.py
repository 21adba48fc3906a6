"""Every flag of Megatron-LM that matters here is taken, explained or refused; a usual command line works as it is."""

import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.command_line import SPELLINGS, make_parser, parse_options
from megatron_fsdp.train.options.job import World
from megatron_fsdp.train.options.megatron_flags import ALIASES, EXPLAINED, FIXED, REFUSED, VALUED
from megatron_fsdp.train.options.options import OPTIONS
from megatron_fsdp.train.options.resolve import resolve
from tests.train.options.megatron_flags import GUIDE, PASTED, SHARDING, USUAL

TAKEN = set(make_parser()._option_string_actions)


def refusal(words: list[str]) -> list[str]:
    """What is wrong with a command line, one text each."""
    with pytest.raises(ConfigurationError) as caught:
        parse_options(words)
    return str(caught.value).split("\nerror: ")


@pytest.mark.parametrize("flags", [SHARDING, USUAL], ids=["sharding", "usual"])
def test_no_flag_of_megatron_is_unknown(flags: list[str]) -> None:
    assert len(flags) > 80
    assert [flag for flag in flags if flag not in TAKEN and flag not in REFUSED] == []


def test_all_flags_of_the_user_guide_are_taken() -> None:
    assert [flag for flag in GUIDE if flag not in TAKEN] == []


def test_a_flag_is_in_one_table_only() -> None:
    tables = [set(EXPLAINED), set(FIXED), set(REFUSED), {option.flag for option in OPTIONS.values()}, set(SPELLINGS)]
    seen: set[str] = set()
    for table in tables:
        assert seen & table == set()
        seen |= table


def test_reasons_end_so_that_advice_can_follow() -> None:
    reasons = [*REFUSED.values(), *EXPLAINED.values(), *(fixed.reason for fixed in FIXED.values())]
    assert [reason for reason in reasons if not reason or reason.endswith((".", ";", " "))] == []


def test_other_spellings_name_options_that_exist() -> None:
    assert {alias.name for alias in ALIASES.values()} <= set(OPTIONS)


def test_a_usual_command_line_is_taken_as_it_is() -> None:
    job = resolve(parse_options(PASTED), World(16, "cuda"))
    assert job.engine == "megatron_fsdp"
    assert job.batch.microbatches == 1
    assert {notice.split()[0].rstrip(":") for notice in job.notices} == {
        "--use-mcore-models",
        "--group-query-attention",
        "--rotary-percent",
        "--attention-dropout",
        "--hidden-dropout",
        "--attention-softmax-in-fp32",
        "--no-masked-softmax-fusion",
        "--attention-backend",
        "--no-create-attention-mask-in-dataloader",
        "--log-throughput",
        "--manual-gc",
        "--manual-gc-interval",
        "--dist-ckpt-strictness",
        "--max-position-embeddings",
        "--save-interval",
        "--use-nccl-ub",
        "--use-distributed-optimizer",
    }


def test_flags_with_one_value_take_it_and_no_other() -> None:
    for value_of in (min, max):
        given = [(flag, value_of(fixed.values)) for flag, fixed in FIXED.items()]
        notices = parse_options([word for pair in given for word in pair]).explained
        assert notices == tuple(f"{flag} {value} has no effect: {FIXED[flag].reason}" for flag, value in given)
    told = refusal([word for flag in FIXED for word in (flag, "0.7")])
    for line, (flag, fixed) in zip(told, FIXED.items(), strict=True):
        assert line.startswith(f"invalid {flag} 0.7: {fixed.reason}; give ")


def test_a_number_may_be_written_in_another_way() -> None:
    assert parse_options(["--hidden-dropout", "0.00"]).explained == (
        "--hidden-dropout 0.00 has no effect: nothing is dropped at random",
    )


def test_flags_without_an_effect_are_told() -> None:
    options = parse_options([word for flag in EXPLAINED for word in ([flag, "x"] if flag in VALUED else [flag])])
    assert options.explained == tuple(f"{flag} has no effect: {reason}" for flag, reason in EXPLAINED.items())
    assert options.origins == {}


@pytest.mark.parametrize("form", ["{}", "{} 1", "{}=1"])
def test_refused_flags_say_why_alone_or_with_a_value(form: str) -> None:
    told = refusal([word for flag in REFUSED for word in form.format(flag).split()])
    assert told == [f"{flag} is not supported: {reason}" for flag, reason in REFUSED.items()]


def test_other_spellings_set_their_option() -> None:
    options = parse_options(
        [word for flag, to in ALIASES.items() for word in ([flag, "2"] if to.value is None else [flag])]
    )
    for alias in ALIASES.values():
        assert options.value(alias.name) == (2 if alias.value is None else alias.value)
    assert options.origins == dict.fromkeys((alias.name for alias in ALIASES.values()), "command line")


def test_everything_wrong_is_told_at_once() -> None:
    told = refusal(
        ["--vocab-file", "a", "--fsdp-doubel-buffer", "--hidden-dropout", "0.1", "--merge-file", "b", "--seed", "1"]
    )
    assert [line.split(" is not")[0].split(": nothing")[0] for line in told] == [
        "--vocab-file",
        "--merge-file",
        "there is no flag --fsdp-doubel-buffer; did you mean --fsdp-double-buffer?",
        "invalid --hidden-dropout 0.1",
    ]
