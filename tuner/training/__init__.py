"""The trainer: batches, log-probs, optimizer."""
