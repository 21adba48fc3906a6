"""The models that the trainer can build, and what they cost to compute."""
