"""Looking into checkpoints, comparing, editing and repacking them: one process, on the CPU, chunk by chunk."""
