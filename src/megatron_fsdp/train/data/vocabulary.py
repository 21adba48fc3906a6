"""Text to token ids and back: plain bytes, or ids that are there already; tokenizers are in `tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_fsdp.train.data.token_file import TokenArray, dtype_for


class Vocabulary(Protocol):
    """What the trainer asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of different token ids."""

    @property
    def end_id(self) -> int | None:
        """Token that ends a text; None: not known."""

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the ids of each text, without an end."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, without ends; what is not valid UTF-8 becomes a replacement character."""


class ByteVocabulary:
    """Every byte is a token; NUL, which text does not contain, ends a text."""

    vocab_size = 256
    end_id = 0

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the UTF-8 bytes of each text (uint8)."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these bytes."""
        return bytes(i for i in ids if i != self.end_id).decode(errors="replace")


class IdVocabulary:
    """Ids without a meaning; as text they are numbers with spaces between them, as with Megatron's NullTokenizer."""

    end_id = None

    def __init__(self, vocab_size: int) -> None:
        """So many ids."""
        self.vocab_size = vocab_size

    def encode(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the numbers in each text; words that are no id are left out."""
        words = [[int(word) for word in text.split() if word.isdecimal()] for text in texts]
        return [np.array([i for i in ids if i < self.vocab_size], dtype_for(self.vocab_size)) for ids in words]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the numbers."""
        return " ".join(map(str, ids))
