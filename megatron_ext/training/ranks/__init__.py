"""What ranks agree on, exchange and do together."""
