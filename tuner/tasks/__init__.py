"""What users bring: the functions, datasets as tasks, and which tasks a step takes."""
