"""Train an agent in an OpenEnv environment, whose server is started and ended with the run.

    python examples/openenv/main.py [key=value ...]

Overrides take the keys of config.yaml beside this file.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tuner import TunerError, TuneResult, tune
from tuner.environments import OpenEnv

HERE = Path(__file__).resolve().parent


def environment() -> OpenEnv:
    """The environment; a row is what `reset` is given."""
    return OpenEnv(
        command=["python", str(HERE / "server.py"), "{port}"],  # or url= of one that runs
        system_prompt="You are a helpful math problem solving agent.",
        train_dataset=[{"seed": seed} for seed in range(512)],
        eval_dataset=[{"seed": seed, "split": "test"} for seed in range(100)],
    )


def main(argv: Sequence[str]) -> TuneResult:
    """Train it."""
    return tune(environment=environment(), config_path=HERE / "config.yaml", overrides=argv)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
