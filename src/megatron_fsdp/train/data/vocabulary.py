"""Text to token ids and back: plain bytes, or a byte-level BPE that is trained on the corpus."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BPE_VOCAB_SIZE = 8192
END_OF_TEXT = "<|end|>"

TokenArray = NDArray[np.uint8] | NDArray[np.uint16]


class Vocabulary(Protocol):
    """What the trainer asks of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of different token ids."""

    @property
    def end_id(self) -> int:
        """Token that separates texts."""

    def encode(self, texts: Sequence[str]) -> TokenArray:
        """Return the ids of all texts in one array, each text followed by `end_id`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids; what is not valid UTF-8 becomes a replacement character."""


class ByteVocabulary:
    """Every byte is a token; NUL, which text does not contain, separates texts."""

    vocab_size = 256
    end_id = 0

    def encode(self, texts: Sequence[str]) -> TokenArray:
        """Return the UTF-8 bytes of all texts, each followed by NUL (uint8)."""
        return np.frombuffer(b"".join(text.encode() + b"\0" for text in texts), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these bytes without the separators."""
        return bytes(i for i in ids if i != self.end_id).decode(errors="replace")


class BpeVocabulary:
    """A byte-level BPE (Sennrich et al. 2016) held by the `tokenizers` library."""

    end_id = 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a tokenizer whose token 0 is the separator."""
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, texts: Sequence[str], vocab_size: int = BPE_VOCAB_SIZE) -> "BpeVocabulary":
        """Learn at most `vocab_size` tokens from texts; small corpora give fewer."""
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
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> "BpeVocabulary":
        """Read a tokenizer that `save` wrote."""
        return cls(Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        self._tokenizer.save(str(path))

    @property
    def vocab_size(self) -> int:
        """Number of different token ids."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> TokenArray:
        """Return the ids of all texts, each followed by the separator (uint16)."""
        pieces = [[*encoding.ids, self.end_id] for encoding in self._tokenizer.encode_batch(list(texts))]
        return np.concatenate([np.asarray(piece, dtype=np.uint16) for piece in pieces])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids without the separators."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
