"""Routing losses in a training step."""
