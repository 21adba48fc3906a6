"""Hugging Face files: weights in and out of sharded models, and adapters in peft's format."""

from megatron_fsdp.checkpoint.hf.adapters import load_adapter, save_adapter
from megatron_fsdp.checkpoint.hf.loading import load_hf
from megatron_fsdp.checkpoint.hf.saving import save_hf

__all__ = ["load_adapter", "load_hf", "save_adapter", "save_hf"]
