"""Tests of what serves: its store, its doors, its process."""
