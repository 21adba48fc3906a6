"""Hugging Face files: weights in and out of sharded models, and adapters in peft's format."""

from megatron_fsdp.checkpoint.hf.adapters import load_adapter, save_adapter
from megatron_fsdp.checkpoint.hf.loading import load_hf
from megatron_fsdp.checkpoint.hf.saving import export_hf, save_hf

__all__ = ["export_hf", "load_adapter", "load_hf", "save_adapter", "save_hf"]
