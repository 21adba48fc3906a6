"""Text to tokens to batches: which samples a step sees does not depend on the number of ranks."""
