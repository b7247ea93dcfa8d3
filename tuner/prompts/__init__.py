"""What is tried without training: prompts that are searched for, and models that are compared."""
