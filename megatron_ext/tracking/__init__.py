"""Where metrics go: one table of names, and the trackers that show them."""
