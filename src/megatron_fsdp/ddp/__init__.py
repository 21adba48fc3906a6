"""Distributed data parallelism by buckets: parameters cut by size, in the order in which backward reaches them."""
