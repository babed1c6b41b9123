"""Log-probs, ratios, policy losses and aggregation. Pure functions over torch tensors; no engine, no environment."""
