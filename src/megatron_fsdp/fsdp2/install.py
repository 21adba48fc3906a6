"""`install`: programs that import torch's `fully_shard` get ours."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, TracebackType
from typing import Any

from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fsdp2.shard import fully_shard
from megatron_fsdp.fsdp2.state import INSTALLED

_LOG = logging.getLogger("megatron_fsdp")

CLIENTS = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "transformers.distributed.fsdp",
    "accelerate.utils.fsdp_utils",
    "trl.models.utils",
    "lightning.fabric.strategies.model_parallel",
    "torchtitan.distributed.fsdp",
    "torchtune.training._distributed",
    "verl.utils.fsdp_utils",
)
"""Modules whose name `fully_shard` is rebound, where they are imported."""


class Installation:
    """Rebound names of `fully_shard`, until `remove` or the end of a ``with`` block."""

    def __init__(self) -> None:
        self.is_active = True
        _rebind(torch_fully_shard, fully_shard)

    def remove(self) -> None:
        """Give all modules torch's function back; models that are sharded stay as they are."""
        if self.is_active:
            self.is_active = False
            _rebind(fully_shard, torch_fully_shard)
            _installed.remove(self)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.remove()


_installed: list[Installation] = []


def install() -> Installation:
    """Have torch's modules and known clients call our `fully_shard`, for programs that one does not edit.

    Call it before the program imports `fully_shard`, or for the clients of `CLIENTS` at any time.

    Returns:
        The installation; its `remove` gives torch's function back, as does the end of ``with install():``.

    Raises:
        ConfigurationError: It is installed already.
    """
    if _installed:
        raise ConfigurationError("megatron_fsdp.fsdp2 is installed already; call install() once, or remove() it first")
    _installed.append(Installation())
    _LOG.info(INSTALLED)
    return _installed[0]


def _rebind(old: Any, new: Any) -> None:
    for name in CLIENTS:
        module = sys.modules.get(name)
        if isinstance(module, ModuleType) and vars(module).get("fully_shard") is old:
            vars(module)["fully_shard"] = new
