"""Computes what `core` decides: turns steps into arrays, runs the model over them, samples."""
