"""The models that the trainer can build, and their FLOPs."""
