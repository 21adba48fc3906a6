"""What may go wrong in a run, and what is done about it."""
