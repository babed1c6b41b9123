"""Published systems, one folder each; `base/` holds what they share."""
