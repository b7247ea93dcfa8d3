"""Environments in other people's formats, each as the workflow, judge and dataset of `tune()`."""

from tuner.environments.program import Program, ProgramOutput
from tuner.environments.seam import Environment, brought

__all__ = ["Environment", "Program", "ProgramOutput", "brought"]
