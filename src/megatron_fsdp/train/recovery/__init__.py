"""Recovery: failures of a run, and what is done about them."""
