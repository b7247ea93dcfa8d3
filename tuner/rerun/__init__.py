"""A recorded rollout once more: the agent in this process, what the model said given back."""
