"""The report that describe() returns: what a sharded model does."""
