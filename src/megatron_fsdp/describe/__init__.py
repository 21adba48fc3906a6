"""What a sharded model does, as applied: the report that describe() prints."""
