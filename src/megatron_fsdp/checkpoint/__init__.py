"""Checkpoints: saving, loading, verification and conversion; reading one needs neither ranks nor a GPU."""
