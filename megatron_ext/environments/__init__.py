"""Environments behind one protocol, and the worker processes that run them."""
