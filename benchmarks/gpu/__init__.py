"""The one command for a machine with a GPU: `python -m benchmarks.gpu`, or `make gpu`."""

import sys
from pathlib import Path

# The benchmarks that are scripts find each other here.
sys.path.insert(0, str(Path(__file__).parents[1]))
