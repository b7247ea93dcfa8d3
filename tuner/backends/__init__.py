"""Who runs the loop."""
