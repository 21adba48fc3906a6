"""Formats of gathered weights, which `wrap` hands to the engine."""
