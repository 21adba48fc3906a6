"""Managers: a configuration and a device mesh in, models made parallel out."""

from megatron_fsdp.automodel.managers.ddp import DDPManager
from megatron_fsdp.automodel.managers.fsdp2 import FSDP2Manager
from megatron_fsdp.automodel.managers.megatron_fsdp import MegatronFSDPManager

__all__ = ["DDPManager", "FSDP2Manager", "MegatronFSDPManager"]
