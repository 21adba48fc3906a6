"""A complete small trainer over the library: `python -m megatron_fsdp.train`."""
