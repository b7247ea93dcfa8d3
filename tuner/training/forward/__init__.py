"""From rows of tokens to the log-probs of what was sampled, in three exact layouts."""
