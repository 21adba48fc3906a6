"""Optimizers that need whole tensors: Muon, Adafactor and declared classes."""
