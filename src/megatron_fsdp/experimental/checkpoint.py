"""Checkpoints of modules that were sharded one by one: folders of `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from megatron_fsdp.wrap.in_place import engine_of_module

_MODEL, _OPTIMIZER = "model", "optimizer"


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Save a model and its optimizer into a DCP folder, which loads on any number of ranks. Collective.

    Entries are `model.NAME` and `optimizer.state.NAME.KEY`, with global shapes.
    """
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state_dict_saver.save({_MODEL: of_model, _OPTIMIZER: of_optimizer}, checkpoint_id=checkpoint_dir)


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_dir: str | os.PathLike[str],
    *,
    sync_model_weights: bool = True,
) -> None:
    """Load a folder of `save_checkpoint` into a model and its optimizer, in place. Collective.

    Args:
        model: Sharded in any way.
        optimizer: Built on its parameters.
        checkpoint_dir: The folder.
        sync_model_weights: Install the weights now; else the next forward does.
    """
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {_MODEL: of_model, _OPTIMIZER: of_optimizer}
    state_dict_loader.load(state, checkpoint_id=checkpoint_dir)
    set_state_dict(model, optimizer, model_state_dict=state[_MODEL], optim_state_dict=state[_OPTIMIZER])
    if sync_model_weights:
        for engine in {id(found): found for module in model.modules() if (found := engine_of_module(module))}.values():
            engine.install_main_weights()
