"""The options about text and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DataOptions:
    """Where text comes from and how it becomes samples.

    Attributes:
        data_path: A text file, a folder of texts or JSONL, a folder of Hugging Face `datasets`, the prefix of
            Megatron's .bin and .idx, or an .npy of token ids; default: the source of the Python standard library.
        json_key: The field of JSONL lines and of datasets that holds the text.
        tokenizer_type: Tokens are bytes; or pieces learned from the text on the spot; or those of `--tokenizer-model`;
            or the data are token ids already. With `--hf-model` those of its folder are the default.
        tokenizer_model: A tokenizer.json, or a folder with one.
        vocab_size: How many pieces to learn; with token ids, how many there are.
        split: Parts of the text to train on and to hold out, such as `95,5`.
        data_cache_path: Folder for token files, which later runs use again; default: in the folder of results.
        eod_mask_loss: The end of a text is not learned.
        num_workers: Processes of each rank that prepare batches ahead; 0: none.
    """

    data_path: Path | None = None
    json_key: str = "text"
    tokenizer_type: Literal["byte", "bpe", "HuggingFaceTokenizer", "NullTokenizer"] = "byte"
    tokenizer_model: Path | None = None
    vocab_size: int | None = None
    split: str = "95,5"
    data_cache_path: Path | None = None
    eod_mask_loss: bool = False
    num_workers: int = 0
