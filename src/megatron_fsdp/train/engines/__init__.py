"""Engines that shard a model and step it: one interface, an implementation for each."""
