"""Pure tensor functions: advantages, policy losses, KL; the algorithm table."""
