"""Search in a small generated library: worlds of passages, a BM25 index, and the environment that asks about them."""
