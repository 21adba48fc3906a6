"""DistributedDataParallel and what belongs to it: another grouping over the same engine."""
