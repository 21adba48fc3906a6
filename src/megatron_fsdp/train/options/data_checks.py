"""Checks of the options about data against each other; what lies on disk is looked at later. Pure."""

from __future__ import annotations

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.options import Options
from megatron_fsdp.train.options.split import parse_split

_SMALLEST_BPE = 257  # 256 bytes and the end of a text
_MOST_IDS = 2**31  # of the widest type that token files have, int32


def check_data(options: Options) -> None:
    """Check split, tokenizer and number of tokens.

    Raises:
        ConfigurationError: One of them is not possible, is missing, or does nothing.
    """
    data = options.data
    parse_split(data.split)
    kind = data.tokenizer_type
    if kind == "HuggingFaceTokenizer" and data.tokenizer_model is None:
        raise ConfigurationError(
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model: give a tokenizer.json, or a folder with one"
        )
    if kind != "HuggingFaceTokenizer" and data.tokenizer_model is not None:
        raise ConfigurationError(
            f"--tokenizer-model does nothing with --tokenizer-type {kind}: leave it out, or give --tokenizer-type "
            "HuggingFaceTokenizer"
        )
    if kind == "NullTokenizer" and data.vocab_size is None:
        raise ConfigurationError("--tokenizer-type NullTokenizer needs --vocab-size: give how many token ids there are")
    if kind in ("byte", "HuggingFaceTokenizer") and data.vocab_size is not None:
        raise ConfigurationError(
            f"--vocab-size does nothing with --tokenizer-type {kind}, which has a size of its own: leave it out, or "
            "give --tokenizer-type bpe or NullTokenizer"
        )
    if kind == "bpe" and data.vocab_size is not None and data.vocab_size < _SMALLEST_BPE:
        raise ConfigurationError(
            f"--vocab-size {data.vocab_size} is less than the 256 bytes and the end of a text: give {_SMALLEST_BPE} or "
            "more"
        )
    if data.vocab_size is not None and data.vocab_size > _MOST_IDS:
        raise ConfigurationError(f"invalid --vocab-size {data.vocab_size}: give at most {_MOST_IDS}")
    _check_ids(options)


def _check_ids(options: Options) -> None:
    """Token ids alone have neither text nor a known end of one."""
    if options.data.tokenizer_type != "NullTokenizer":
        return
    if options.data.data_path is None:
        raise ConfigurationError(
            "--tokenizer-type NullTokenizer needs --data-path: give the prefix of a .bin and .idx, or an .npy"
        )
    if options.data.eod_mask_loss:
        raise ConfigurationError(
            "--eod-mask-loss does nothing with --tokenizer-type NullTokenizer, which knows no end of a text: leave it "
            "out, or give the tokenizer that made the ids"
        )
    prompt, ids = options.reporting.prompt, options.data.vocab_size or 0
    if options.is_given("prompt") and not all(word.isdecimal() for word in prompt.split()):
        raise ConfigurationError(
            f"--prompt {prompt!r} is no token ids, and --tokenizer-type NullTokenizer knows no text: give numbers with "
            "spaces between them, or leave it out"
        )
    if options.is_given("prompt") and any(int(word) >= ids for word in prompt.split()):
        raise ConfigurationError(f"--prompt {prompt!r} has ids that --vocab-size {ids} does not: give 0 to {ids - 1}")
