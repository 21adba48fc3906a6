"""Hang diagnosis: the logs of all ranks, read together, name the rank that stands out."""
