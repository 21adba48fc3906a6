"""The `mfsdp` command: argument parsing only."""
