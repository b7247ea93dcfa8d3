"""What is done beside training: check, evaluate, compare, export, search, and look at a run."""
