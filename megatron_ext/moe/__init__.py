"""Routing under RL: the router policy and load metrics."""
