"""Inspecting, comparing, editing and repacking checkpoints: one process, on the CPU, chunk by chunk."""
