"""Checkpoints: saving, loading, verification and conversion; reading one needs neither ranks nor a GPU."""

from megatron_fsdp.checkpoint.checkpointer import Checkpointer, save_checkpoint
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.load import load_checkpoint
from megatron_fsdp.checkpoint.report import LoadReport

__all__ = ["CheckpointFolder", "Checkpointer", "LoadReport", "load_checkpoint", "save_checkpoint"]
