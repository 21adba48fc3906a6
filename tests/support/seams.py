"""The one door into a sharded model and its tensors, for tests of what no public function shows."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.config.engine_options import EngineOptions
from megatron_fsdp.engine.engine import Engine


def engine_of(model: MegatronFSDP) -> Engine:
    """Return the engine: its units, scheduler, executor and observers."""
    return model._engine


def options_of(model: MegatronFSDP) -> EngineOptions:
    """Return what the arguments of the wrapper were resolved to."""
    return model._options


def local_of(tensor: Tensor) -> Tensor:
    """Return the very tensor that lies below a DTensor, with what is written on it; `to_local()` may make a view."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()
