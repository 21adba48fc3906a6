"""From documents to token files: texts are split by their beginnings, encoded in batches, and written as they come."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_fsdp.train.data.indexed import IndexedWriter, bin_of, idx_of, open_indexed
from megatron_fsdp.train.data.texts import Document
from megatron_fsdp.train.data.token_file import TokenFile, dtype_for
from megatron_fsdp.train.data.vocabulary import Vocabulary
from megatron_fsdp.train.options.job import Split

Side = Literal["training", "held_out", "aside"]

_BATCH = 2**23  # characters encoded in one go
_UNFAIR = 4.0  # a side may have so many times more, or less, than its share
_FEW = 100  # documents; fewer cannot be cut into three shares by their hashes
_COUNTED = 2**20  # tokens whose bytes are counted where that takes decoding
SAMPLE_BYTES = 32 * 1024**2  # that a BPE is trained on: minutes, and more changes little


@dataclass(frozen=True)
class Piece:
    """A part of a document.

    Attributes:
        text: It.
        side: Of the document.
        is_last: Whether the document ends with it.
    """

    text: str
    side: Side
    is_last: bool


@dataclass(frozen=True)
class Encoded:
    """Token files that were written.

    Attributes:
        training: To train on.
        held_out: To evaluate on.
        held_out_bytes: UTF-8 bytes that the held-out tokens stand for, ends of texts counted as one.
        is_cut: Whether the end of the whole was held out, since whole documents would have missed the shares.
    """

    training: TokenFile
    held_out: TokenFile
    held_out_bytes: int
    is_cut: bool


def side_of(beginning: str, split: Split) -> Side:
    """Decide by the hash of a document's first piece: copies lie on one side, and order does not matter."""
    digest = hashlib.sha256(beginning.encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < split.held_out:
        return "held_out"
    return "aside" if place < split.held_out + split.aside else "training"


def pieces(documents: Iterable[Document], split: Split) -> Iterator[Piece]:
    """Yield the pieces of all documents but those that are left aside, in order; of a few, none is left aside."""
    found = iter(documents)
    first = list(itertools.islice(found, _FEW))
    if len(first) < _FEW:
        split = replace(split, aside=0.0)
    for document in itertools.chain(first, found):
        text = next(document, None)
        if text is None:
            continue
        side = side_of(text, split)
        while text is not None and side != "aside":
            following = next(document, None)
            yield Piece(text, side, following is None)
            text = following


def sample_texts(documents: Iterable[Document], split: Split, size: int, limit: int = SAMPLE_BYTES) -> list[str]:
    """Return about `limit` bytes of text to train a tokenizer on, spread evenly over `size` bytes.

    Held-out texts are left out, unless there is nothing else.
    """
    every = max(1, math.ceil(size / limit))
    chosen = [piece for number, piece in enumerate(pieces(documents, split)) if number % every == 0]
    return [piece.text for piece in chosen if piece.side == "training"] or [piece.text for piece in chosen]


def encode_documents(documents: Iterable[Document], vocabulary: Vocabulary, split: Split, folder: Path) -> Encoded:
    """Write all documents as tokens, each followed by the end of a text.

    Args:
        documents: Gone through once.
        vocabulary: Has an end of a text.
        split: Which share goes where, by documents; where that misses the shares by far (few documents, or very
            unequal ones), the end of the whole is held out instead.
        folder: Empty.
    """
    dtype = dtype_for(vocabulary.vocab_size)
    end = np.array([vocabulary.end_id], dtype)
    held_out_bytes, prefixes = 0, {"training": folder / "training", "held_out": folder / "held_out"}
    with IndexedWriter(prefixes["training"], dtype) as training:
        with IndexedWriter(prefixes["held_out"], dtype) as held_out:
            writers = {"training": training, "held_out": held_out}
            for batch in _batches(pieces(documents, split)):
                for piece, ids in zip(batch, vocabulary.encode([piece.text for piece in batch]), strict=True):
                    writer = writers[piece.side]
                    writer.add(ids)
                    if piece.is_last:
                        writer.add(end)
                        writer.end_document()
                    if piece.side == "held_out":
                        held_out_bytes += len(piece.text.encode()) + piece.is_last
        is_cut = not is_fair(training.tokens, held_out.tokens, split)
        if is_cut:
            if held_out.tokens:
                training.add_all(open_indexed(prefixes["held_out"]))
            bin_of(prefixes["held_out"]).unlink()
            idx_of(prefixes["held_out"]).unlink()
    whole = TokenFile(bin_of(prefixes["training"]), dtype.str, 0, training.tokens)
    if not is_cut:
        return Encoded(
            whole, TokenFile(bin_of(prefixes["held_out"]), dtype.str, 0, held_out.tokens), held_out_bytes, is_cut
        )
    first, second = cut_end(whole, split)
    return Encoded(first, second, count_bytes(second, vocabulary), is_cut)


def is_fair(training: int, held_out: int, split: Split) -> bool:
    """Whether both sides have their share of the tokens, roughly."""
    wanted = split.held_out / (split.training + split.held_out)
    found = held_out / max(1, training + held_out)
    return training > 0 and wanted / _UNFAIR <= found <= min(wanted * _UNFAIR, 1 - (1 - wanted) / _UNFAIR)


def cut_end(whole: TokenFile, split: Split) -> tuple[TokenFile, TokenFile]:
    """Cut tokens where they are: the end, at least one token of it, is held out."""
    share = split.held_out / (split.training + split.held_out)
    cut = whole.count - min(whole.count, max(1, round(whole.count * share)))
    return whole.part(0, cut), whole.part(cut, whole.count)


def count_bytes(tokens: TokenFile, vocabulary: Vocabulary) -> int:
    """Return how many UTF-8 bytes tokens stand for: counted for the first million, and as many each for the rest."""
    first = tokens.part(0, min(tokens.count, _COUNTED)).open()
    if not len(first):
        return 0
    ends = int(np.count_nonzero(first == vocabulary.end_id))
    counted = len(vocabulary.decode(first.tolist()).encode()) + ends
    return round(counted * tokens.count / len(first))


def _batches(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
