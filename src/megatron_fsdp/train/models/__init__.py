"""Builds the model of a run: a decoder of this package or one of transformers; shards it and steps it."""
