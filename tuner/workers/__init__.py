"""The user's functions in processes of their own: the run's side, a worker's, what they say."""
