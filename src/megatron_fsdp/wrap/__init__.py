"""Wrapping of a model, once: it is checked, its units are found and sharded, hooks are registered."""
