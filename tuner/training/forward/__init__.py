"""From rows of tokens to the log-probs of the sampled tokens, in three exact layouts."""
