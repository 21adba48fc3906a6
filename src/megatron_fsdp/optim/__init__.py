"""Optimizer integration: the step on local tensors, the gradient norm, statistics."""
