"""Optimizer integration: the step on local tensors, the gradient norm, optimizers of whole tensors."""
