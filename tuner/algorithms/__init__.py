"""Pure tensor functions: advantages, policy losses, KL, aggregation; the table of algorithms."""
