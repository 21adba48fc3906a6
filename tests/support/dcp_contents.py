"""Everything that a checkpoint of torch.distributed.checkpoint holds, read by one process without ranks."""

import warnings
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.support.on_ranks import assert_equal_tensors


def contents(folder: str) -> dict[str, Any]:
    """Whole tensors and objects by their flat keys."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(found, checkpoint_id=folder, no_dist=True)
    return found


def assert_same_contents(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert the same keys, bits and objects."""
    assert found.keys() == expected.keys()
    for key, want in expected.items():
        if isinstance(want, torch.Tensor):
            assert_equal_tensors({key: found[key]}, {key: want})
        else:
            assert found[key] == want, key
