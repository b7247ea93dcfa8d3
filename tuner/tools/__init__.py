"""Tools around training: check, evaluate, compare, export, search, and view runs."""
