"""A step that was kept whole, done again."""
