"""Before training: the folder for results, the vocabulary and the tokens, made by the first rank and shared by all."""

import json
from datetime import datetime
from pathlib import Path

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.arguments import Settings
from megatron_fsdp.train.corpus import find_source, load_corpus
from megatron_fsdp.train.data import (
    TokenSets,
    encode_corpus,
    load_token_sets,
    require_enough_tokens,
    save_token_sets,
)
from megatron_fsdp.train.ranks import Rank, agree
from megatron_fsdp.train.vocabulary import BpeVocabulary, ByteVocabulary, Vocabulary

TOKENIZER_FILE = "tokenizer.json"
DATA_FILE = "data.json"


def name_folder(out: Path | None, now: datetime) -> Path:
    """Return the absolute path of the folder for results, which need not exist yet.

    Raises:
        ConfigurationError: It holds an earlier run.
    """
    folder = (out if out is not None else Path("runs", now.strftime("%Y%m%d-%H%M%S"))).absolute()
    if (folder / DATA_FILE).exists():
        raise ConfigurationError(f"--out {str(out)!r} holds an earlier run: give a new folder, or remove that one")
    return folder


def write_data(settings: Settings, folder: Path) -> None:
    """Read the text and leave tokens and vocabulary in the folder, which is made when the text has proved good.

    Raises:
        ConfigurationError: There is no text, or too little, or the folder cannot be made.
    """
    corpus = load_corpus(find_source(settings.arguments.data))
    is_bpe = settings.arguments.tokenizer == "bpe"
    vocabulary = BpeVocabulary.train(corpus.training) if is_bpe else ByteVocabulary()
    sets = encode_corpus(corpus, vocabulary)
    require_enough_tokens(sets, settings.preset.sequence_length)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--out {folder} cannot be made ({error.strerror}): give another folder") from None
    if isinstance(vocabulary, BpeVocabulary):
        vocabulary.save(folder / TOKENIZER_FILE)
    save_token_sets(sets, folder)
    (folder / DATA_FILE).write_text(json.dumps({"held_out_bytes": sets.held_out_bytes}))


def read_data(settings: Settings, folder: Path) -> tuple[Vocabulary, TokenSets]:
    """Open what `write_data` left."""
    vocabulary: Vocabulary = ByteVocabulary()
    if settings.arguments.tokenizer == "bpe":
        vocabulary = BpeVocabulary.load(folder / TOKENIZER_FILE)
    held_out_bytes = json.loads((folder / DATA_FILE).read_text())["held_out_bytes"]
    return vocabulary, load_token_sets(folder, held_out_bytes)


def prepare(settings: Settings, rank: Rank) -> tuple[Path, Vocabulary, TokenSets]:
    """Make or find the folder, the vocabulary and the tokens; the first rank does the work.

    Raises:
        ConfigurationError: On every rank, for what is wrong with the data or the folder.
    """

    def work() -> Path:
        folder = name_folder(settings.arguments.out, datetime.now().astimezone())
        write_data(settings, folder)
        return folder

    folder = agree(rank, work)
    return folder, *read_data(settings, folder)
