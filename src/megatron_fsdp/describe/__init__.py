"""The report of `describe()` on a sharded model."""
