"""Optimizer integration: the step, the gradient norm, checks of gradients."""
