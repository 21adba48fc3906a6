"""Text to token ids: bytes, or a tokenizer of the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_fsdp.errors import ConfigurationError, MissingPackageError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.train.data.token_file import TokenArray, dtype_for

BPE_VOCAB_SIZE = 8192
END_OF_TEXT = "<|end|>"
ENDS = (END_OF_TEXT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]")
"""End-of-text tokens to look for, in this order, in tokenizers that do not name theirs."""

_FILE = "tokenizer.json"
_OLDER = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "merges.txt")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


class ByteTokenizer:
    """Every byte is a token; NUL, which text does not contain, ends a text."""

    vocab_size = 256
    end_id = 0

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the UTF-8 bytes of each text (uint8), without the end-of-text token."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def save(self, path: Path) -> None:
        """Do nothing: bytes need no file."""


class PieceTokenizer:
    """A tokenizer of the library and the token that ends a text; `vocab_size` is one more than the largest id."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        """Wrap a tokenizer that has the token `end`; its truncation and padding are switched off."""
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self.end_id, self.vocab_size = ids[end], max(ids.values()) + 1

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the ids of each text without an end-of-text token, in the smallest dtype that holds them."""
        dtype = dtype_for(self.vocab_size)
        return [np.array(found.ids, dtype) for found in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        self._tokenizer.save(str(path))


def train_bpe(texts: Iterable[str], vocab_size: int = BPE_VOCAB_SIZE) -> PieceTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016) of at most `vocab_size` tokens; small texts give fewer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PieceTokenizer(tokenizer, END_OF_TEXT)


def load_tokenizer(path: Path) -> PieceTokenizer:
    """Read a tokenizer.json, or a folder of Hugging Face; nothing is downloaded or executed.

    Settings beside it may say which token ends a text. A folder with a vocabulary only is read by transformers.
    """
    file = tokenizer_files(path)[0]
    try:
        if file.name in _OLDER:
            tokenizer, ends = _read_by_transformers(file)
        else:
            tokenizer, ends = Tokenizer.from_file(str(file)), [_said_end(file.with_name(name)) for name in _SETTINGS]
    except MissingPackageError:
        raise
    except Exception as error:  # noqa: BLE001  # the libraries raise nothing more special
        raise ConfigurationError(f"--tokenizer-model {file} cannot be read ({error}): give a tokenizer.json") from None
    for end in (*ends, *ENDS):
        if end is not None and tokenizer.token_to_id(end) is not None:
            return PieceTokenizer(tokenizer, end)
    raise ConfigurationError(
        f"--tokenizer-model {file} has no token that ends a text: looked for eos_token in {' and '.join(_SETTINGS)} "
        f"beside it, and for {', '.join(ENDS)}; add one of these"
    )


def tokenizer_files(path: Path) -> list[Path]:
    """Return the files that decide a tokenizer: tokenizer.json or else a vocabulary first, and settings beside it."""
    names = [_FILE, *_OLDER] if path.is_dir() else [path.name]
    folder = path if path.is_dir() else path.parent
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise ConfigurationError(
            f"--tokenizer-model {path} has no {_FILE}: give such a file or a folder with one, or --tokenizer-type "
            "byte, to train on bytes"
        )
    used = found[:1] if found[0].name not in _OLDER else found
    return used + [folder / name for name in _SETTINGS if (folder / name).is_file()]


def _read_by_transformers(file: Path) -> tuple[Tokenizer, list[str | None]]:
    """Convert the vocabulary of a folder; none of its code runs."""
    transformers: Any = require("transformers", f"a --tokenizer-model without a {_FILE}", instead="give one with it")
    found: Any = transformers.AutoTokenizer.from_pretrained(
        str(file.parent), local_files_only=True, trust_remote_code=False
    )
    return found.backend_tokenizer, [found.eos_token]


def _said_end(path: Path) -> str | None:
    """Return the `eos_token` of a settings file: a string, or an object with the string as `content`."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found: Any = settings.get("eos_token") if isinstance(settings, dict) else None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None
