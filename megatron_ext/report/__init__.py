"""A run read back and shown: data from its folder, charts, comparisons, sample trajectories, one HTML file."""
