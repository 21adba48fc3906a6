"""Before training: the vocabulary and the tokens, made by the first rank of a machine and shared by all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.data.corpus import find_source, load_corpus
from megatron_fsdp.train.data.vocabulary import BpeVocabulary, ByteVocabulary, TokenArray, Vocabulary
from megatron_fsdp.train.launch.ranks import Rank, agree
from megatron_fsdp.train.options.job import Job

TOKENIZER_FILE = "tokenizer.json"
DATA_FILE = "data.json"
TRAINING_FILE = "training.npy"
HELD_OUT_FILE = "held_out.npy"


@dataclass(frozen=True)
class TokenData:
    """The text as token ids.

    Attributes:
        training: Ids to train on.
        held_out: Ids to evaluate on.
        held_out_bytes: UTF-8 bytes that the held-out ids stand for (for bits per byte); 0: not known.
        vocabulary: From text to ids and back.
    """

    training: TokenArray
    held_out: TokenArray
    held_out_bytes: int
    vocabulary: Vocabulary


def write_data(job: Job, folder: Path) -> None:
    """Read the text and leave tokens and vocabulary in the folder.

    Raises:
        ConfigurationError: There is no text, or too little.
    """
    path = job.options.data.data_path
    corpus = load_corpus(find_source(None if path is None else str(path)))
    is_bpe = job.options.data.tokenizer_type == "bpe"
    vocabulary: Vocabulary = BpeVocabulary.train(corpus.training) if is_bpe else ByteVocabulary()
    training, held_out = vocabulary.encode(corpus.training), vocabulary.encode(corpus.held_out)
    for name, tokens in (("training", training), ("held-out", held_out)):
        if len(tokens) <= job.seq_length:
            raise ConfigurationError(
                f"the {name} text has {len(tokens):,} tokens and one sample needs {job.seq_length + 1:,}: "
                "give --data-path more text or lower --seq-length"
            )
    if isinstance(vocabulary, BpeVocabulary):
        vocabulary.save(folder / TOKENIZER_FILE)
    np.save(folder / TRAINING_FILE, training)
    np.save(folder / HELD_OUT_FILE, held_out)
    held_out_bytes = sum(len(text.encode()) + 1 for text in corpus.held_out)
    (folder / DATA_FILE).write_text(json.dumps({"held_out_bytes": held_out_bytes}))


def read_data(job: Job, folder: Path) -> TokenData:
    """Open what `write_data` left; all ranks of a machine share the memory."""
    vocabulary: Vocabulary = ByteVocabulary()
    if job.options.data.tokenizer_type == "bpe":
        vocabulary = BpeVocabulary.load(folder / TOKENIZER_FILE)
    held_out_bytes = json.loads((folder / DATA_FILE).read_text())["held_out_bytes"]
    training = np.load(folder / TRAINING_FILE, mmap_mode="r")
    return TokenData(training, np.load(folder / HELD_OUT_FILE, mmap_mode="r"), held_out_bytes, vocabulary)


def prepare_data(job: Job, folder: Path, rank: Rank) -> TokenData:
    """Make the tokens, or find those of an earlier start; collective.

    Args:
        job: Where text comes from.
        folder: Of results; there already.
        rank: This process.

    Raises:
        ConfigurationError: On every rank, for what is wrong with the data.
    """

    def work() -> None:
        if not (folder / DATA_FILE).exists():
            write_data(job, folder)

    agree(rank, work)
    return read_data(job, folder)
