"""Looking into checkpoints, comparing them, and plain `torch.save` files: one process, on the CPU, chunk by chunk."""
