"""Layers of the networks."""
