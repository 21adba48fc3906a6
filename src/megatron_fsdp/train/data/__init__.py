"""Text to tokens to batches; the samples of a step do not depend on the number of ranks."""
