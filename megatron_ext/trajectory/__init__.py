"""The record of what was generated: flat arrays with offsets, rows for the trainer, and the store."""
