"""Train an environment of gymnasium's as it is.

    python examples/gymnasium/main.py [key=value ...]

Overrides take the keys of config.yaml beside this file. `tuner run examples/gymnasium/config.yaml`
does the same.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import arithmetic_env  # registers it
import gymnasium

from tuner import TunerError, TuneResult, tune

HERE = Path(__file__).resolve().parent
del arithmetic_env


def main(overrides: Sequence[str]) -> TuneResult:
    """Train, and say what was gained."""
    result = tune(
        environment=gymnasium.make("Arithmetic-v0"),
        config_path=HERE / "config.yaml",
        overrides=overrides,
    )
    print(result)
    return result


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
