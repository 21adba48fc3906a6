"""What shards a model and steps it: one interface, an implementation for each engine."""
