"""Learning while serving: the data, the training, the proof, and the weights that serve."""
