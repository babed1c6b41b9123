"""The training ranks: scoring forwards, the optimizer step, checkpoints, weight publishing and the main loop."""
