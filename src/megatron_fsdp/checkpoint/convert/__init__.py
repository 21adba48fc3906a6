"""Conversion of Megatron's `torch_dist` checkpoints: a plan of moves, carried out one at a time, then verified."""
