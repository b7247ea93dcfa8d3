"""The user's functions: what they are given and return, and how they are called and loaded."""
