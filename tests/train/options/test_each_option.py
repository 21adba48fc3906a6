"""Each option and each field of the engine's configuration changes something that can be seen."""

from pathlib import Path

import pytest

from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.options import OPTIONS
from megatron_fsdp.train.options.resolve import resolve
from tests.train.options.cases import Case
from tests.train.options.field_cases import FIELD_CASES
from tests.train.options.option_cases import OPTION_CASES

CASES = {**OPTION_CASES, **FIELD_CASES}


def job_of(words: str, world: World) -> Job:
    return resolve(parse_options(words.split()), world)


@pytest.mark.parametrize("name", CASES)
def test_an_option_changes_what_it_is_said_to(name: str) -> None:
    case: Case = CASES[name]
    before = case.seen(job_of(case.start, case.world))
    if isinstance(case.expected, str) and case.seen.__name__ == "notices":
        with pytest.raises(ConfigurationError) as caught:
            job_of(f"{case.start} {case.words}", case.world)
        assert str(caught.value).startswith(case.expected)
        return
    after = case.seen(job_of(f"{case.start} {case.words}", case.world))
    assert after == case.expected
    assert after != before


SAMPLES = {int: ("7", 7), float: ("0.5", 0.5), str: ("word", "word"), Path: ("place", Path("place"))}


def test_every_flag_sets_its_option() -> None:
    words, expected = list[str](), {}
    for name, option in OPTIONS.items():
        if option.is_switch:
            words.append(option.off_flags[0] if option.default else option.flag)
            expected[name] = not option.default
        elif option.choices:
            expected[name] = next(choice for choice in option.choices if choice != option.default)
            words += [option.flag, expected[name]]
        else:
            text, expected[name] = SAMPLES[option.kind]
            words += [option.flag, text]
    options = parse_options(words)
    assert {name: options.value(name) for name in OPTIONS} == expected
    assert [name for name, option in OPTIONS.items() if option.default == expected[name]] == []
    assert options.origins == dict.fromkeys(OPTIONS, "command line")


def test_no_field_lacks_a_case() -> None:
    assert set(FIELD_CASES) == set(DistributedDataParallelConfig.__dataclass_fields__)
