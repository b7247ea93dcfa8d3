"""Tests of the engines, on small random models of several shapes."""
