"""The engine over a transformers model in this process."""
