"""Datasets as tasks, and conversations and pairs of a dataset as token ids."""
