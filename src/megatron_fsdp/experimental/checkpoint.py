"""Checkpoints of modules that were sharded one by one: folders of `torch.distributed.checkpoint`."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict

from megatron_fsdp.checkpoint.load import load_checkpoint as load_into
from megatron_fsdp.comm.agreement import all_agree
from megatron_fsdp.engine.engine import engine_of_module, ranks_of_model


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Save a model and its optimizer into a DCP folder, which loads on any number of ranks. Collective.

    Entries are `model.NAME` and `optimizer.state.NAME.KEY`, with global shapes.
    """
    with all_agree("collecting the state to save", ranks_of_model(model)):
        of_model, of_optimizer = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=checkpoint_dir)


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_dir: str | os.PathLike[str],
    *,
    sync_model_weights: bool = True,
) -> None:
    """Load a folder of `save_checkpoint` into a model and its optimizer, in place. Collective.

    It may also be one that `megatron_fsdp.checkpoint` or a wrapper has written, in DCP's way or their own.

    Args:
        model: Sharded in any way.
        optimizer: Built on its parameters.
        checkpoint_dir: The folder.
        sync_model_weights: Install the weights now; else the next forward does.

    Raises:
        CheckpointError: It is no checkpoint, incomplete, damaged or another model's; the same on every rank.
    """
    load_into(model, optimizer, checkpoint_dir, with_rng=False)
    if sync_model_weights:
        for engine in {id(found): found for module in model.modules() if (found := engine_of_module(module))}.values():
            engine.install_main_weights()
