"""Credit edits that several systems share. A system's own edit lives in its recipe."""
