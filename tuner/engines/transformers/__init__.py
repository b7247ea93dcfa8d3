"""Engine that runs a transformers model in this process."""
