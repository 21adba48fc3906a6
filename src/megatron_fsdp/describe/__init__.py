"""The report of `describe` on a sharded model."""

from megatron_fsdp.describe.description import Description
from megatron_fsdp.describe.model import describe

__all__ = ["Description", "describe"]
