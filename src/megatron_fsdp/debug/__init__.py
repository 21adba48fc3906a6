"""Debugging tools for a run: lifetimes of gathered weights, verification across ranks, checks of gradients."""
