"""The report of `describe` on a sharded model."""

from typing import TYPE_CHECKING, Any

from megatron_fsdp.describe.description import Description

if TYPE_CHECKING:
    from megatron_fsdp.describe.model import describe

__all__ = ["Description", "describe"]


def __getattr__(name: str) -> Any:
    """Import `describe` when it is asked for: commands that only fold text import no torch."""
    if name == "describe":
        from megatron_fsdp.describe.model import describe

        return describe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
