"""Small checkpoints of every kind, made without the tools under test wherever torch can make them."""

import argparse
import itertools
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.save import TensorSource, write_state
from megatron_fsdp.sharding.shards import Box
from tests.support.torch_dist import GptSpec, WriteOptions, make_truth, write_torch_dist


def save(state: Mapping[str, Any], path: Path) -> CheckpointFolder:
    """Plain `dcp.save` of one process."""
    dcp_save(dict(state), path)
    return CheckpointFolder(path)


def dcp_save(state: dict[str, Any], path: Path, **kwargs: Any) -> None:
    """`dcp.save` of one process, without its warning that there is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, checkpoint_id=path, no_dist=True, **kwargs)


def save_cut(tensors: Mapping[str, tuple[torch.Tensor, Sequence[Box]]], path: Path) -> CheckpointFolder:
    """Tensors, each cut into the boxes given."""
    path.mkdir(parents=True)
    sources = {
        key: TensorSource(tuple(values.shape), values.dtype, boxes, partial(_box_of, values))
        for key, (values, boxes) in tensors.items()
    }
    write_state(sources, path, paths={})
    return CheckpointFolder(path)


def _box_of(values: torch.Tensor, box: Box) -> torch.Tensor:
    return values[box.indices]


def grid(shape: tuple[int, int], rows: Sequence[int], columns: Sequence[int]) -> list[Box]:
    """Boxes between the edges given."""
    row_edges, column_edges = [0, *rows, shape[0]], [0, *columns, shape[1]]
    return [
        Box((top, left), (bottom - top, right - left))
        for top, bottom in itertools.pairwise(row_edges)
        for left, right in itertools.pairwise(column_edges)
    ]


def save_torch_dist(path: Path, generation: str, *, optimizer: str = "model_space") -> CheckpointFolder:
    """A torch_dist checkpoint of one of the three generations."""
    kind = {"model_space": "fully_reshardable", "bucket_space": "dp_reshardable", "none": "none"}[optimizer]
    options = WriteOptions(generation=int(generation[1]), kind=kind)
    return CheckpointFolder(write_torch_dist(path, make_truth(GptSpec()), options))


def save_fsdp_dtensor(path: Path) -> CheckpointFolder:
    """The nested state of Megatron-FSDP."""
    weight = {"layers.2.weight": torch.randn(4, 3), "layers.10.weight": torch.randn(4, 3), "norm.weight": torch.ones(3)}
    state = {
        "model": {f"module.{key}": value for key, value in weight.items()},
        "optimizer": {
            "state": {
                f"module.{key}": {"exp_avg": value * 2, "step": torch.tensor(3.0)} for key, value in weight.items()
            },
            "param_to_group_meta": {f"module.{key}": {"lr": 0.1, "betas": (0.9, 0.95)} for key in weight},
        },
        "args": argparse.Namespace(num_layers=2, swiglu=True, lr=0.1),
        "iteration": 7,
        "checkpoint_version": 3.0,
    }
    return save(state, path)
