"""Where metrics go: console, JSONL, TensorBoard and trackers."""
