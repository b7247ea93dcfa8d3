"""The trainer: batches, log-probs, losses and the optimizer."""
