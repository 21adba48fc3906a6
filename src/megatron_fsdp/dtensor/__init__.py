"""DTensors with uneven shards: their description, the operations on them, and gathering them."""
