"""Realistic `torch_dist` checkpoints of tiny models, written without Megatron, ranks or a GPU.

The truth comes first (`gpt.py`: one tensor per parameter, as a live model holds them), then how a file lays it out
(`layout.py`), then the non-tensor state (`common.py`), then the folder (`write.py`).
"""
