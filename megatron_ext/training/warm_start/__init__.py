"""The supervised warm start: imitation of a script until it sometimes wins."""
