"""Rewards of finished episodes: named parts with weights and caps, and judges that label turns."""
