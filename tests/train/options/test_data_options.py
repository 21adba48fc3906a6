import pytest

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.checks import check_options
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Split, parse_split


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("95,5", Split(0.95, 0.05)),
        ("1,3", Split(0.25, 0.75)),
        ("0.5, 0.25, 0.25", Split(0.5, 0.25, 0.25)),
        ("969,30,1", Split(0.969, 0.03, 0.001)),
    ],
)
def test_splits_are_shares(text: str, split: Split) -> None:
    assert parse_split(text) == split


@pytest.mark.parametrize(
    "text",
    [
        "",
        "95",
        "95,",
        "95,five",
        "100,0",
        "0,1",
        "1,2,3,4",
        "-1,2",
        "nan,1",
        "inf,1",
        "1,1,-1",
        "1e308,1e308,1e308",
        "1,1e-320,1e308",
    ],
)
def test_other_splits_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"invalid --split {text}: give two numbers above 0"):
        parse_split(text)


GOOD = [
    "",
    "--tokenizer-type byte --eod-mask-loss",
    "--tokenizer-type bpe --vocab-size 257",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model folder",
    "--tokenizer-type NullTokenizer --vocab-size 10 --data-path ids",
    "--tokenizer-type NullTokenizer --vocab-size 10 --data-path ids --prompt 9",
]

BAD = [
    ("--split 1", "invalid --split 1: give"),
    ("--tokenizer-type HuggingFaceTokenizer", "HuggingFaceTokenizer needs --tokenizer-model: give a tokenizer.json"),
    ("--tokenizer-model x", "--tokenizer-model does nothing without --tokenizer-type HuggingFaceTokenizer"),
    (
        "--tokenizer-type bpe --tokenizer-model x",
        "--tokenizer-model does nothing without --tokenizer-type HuggingFaceTokenizer",
    ),
    ("--tokenizer-type NullTokenizer --data-path x", "NullTokenizer needs --vocab-size: give how many"),
    ("--tokenizer-type NullTokenizer --vocab-size 9", "NullTokenizer needs --data-path: give the prefix"),
    ("--vocab-size 300", "--vocab-size does nothing without --tokenizer-type bpe or NullTokenizer"),
    (
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model x --vocab-size 9",
        "--vocab-size does nothing without --tokenizer-type bpe or NullTokenizer",
    ),
    ("--tokenizer-type bpe --vocab-size 256", "--vocab-size 256 is less than the 256 bytes and the end of a text"),
    (
        f"--tokenizer-type NullTokenizer --vocab-size {2**31 + 1} --data-path x",
        f"invalid --vocab-size {2**31 + 1}: give at most {2**31}",
    ),
    (
        "--tokenizer-type NullTokenizer --vocab-size 9 --data-path x --eod-mask-loss",
        "--eod-mask-loss does nothing with --tokenizer-type NullTokenizer",
    ),
    (
        "--tokenizer-type NullTokenizer --vocab-size 9 --data-path x --prompt def",
        "--prompt 'def' is no token ids below --vocab-size 9",
    ),
    (
        "--tokenizer-type NullTokenizer --vocab-size 9 --data-path x --prompt 9",
        "--prompt '9' is no token ids below --vocab-size 9",
    ),
]


@pytest.mark.parametrize("line", GOOD)
def test_what_goes_together_passes(line: str) -> None:
    check_options(parse_options(line.split()))


@pytest.mark.parametrize(("line", "said"), BAD)
def test_what_does_not_is_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_options(parse_options(line.split()))
