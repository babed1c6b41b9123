"""Checkpoints: what is written, how, and how any layout reads it."""
