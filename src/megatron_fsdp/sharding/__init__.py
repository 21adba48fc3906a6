"""Plans of shards and units (pure), and the process groups of the mesh."""
