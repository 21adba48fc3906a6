"""Flat buffers, the pools that lend them memory, and the collectives that move them."""
