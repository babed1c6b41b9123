"""Rewards of finished episodes: named parts with weights and caps."""
