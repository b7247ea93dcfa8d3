"""What is done beside training: evaluate, compare, export, and look at what is installed."""
