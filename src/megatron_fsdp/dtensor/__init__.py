"""Tensors whose shards are not torch's even cut: what they are, how operations run on them, how they are gathered."""
