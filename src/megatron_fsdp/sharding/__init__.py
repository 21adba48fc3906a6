"""Pure planning of shards: placements, layouts, units, meshes."""
