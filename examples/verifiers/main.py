"""Train an environment of verifiers' as it is.

    python examples/verifiers/main.py [key=value ...]

Overrides take the keys of config.yaml beside this file, as in `buffer.total_steps=10`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import verifiers.v1 as vf

from tuner import TunerError, TuneResult, tune
from tuner.environments import Verifiers

HERE = Path(__file__).resolve().parent
TRAINING = 3000  # rows of the taskset; the others are held out


def environment() -> Verifiers:
    """It, and which of its tasks are held out; `tune(environment=env)` trains on all."""
    config = vf.resolve_env_config(
        {
            "taskset": {"id": "word_problems"},
            "agent": {"runtime": {"type": "subprocess"}},  # Prime's sandboxes otherwise
        }
    )
    env = vf.load_environment(config)
    return Verifiers(
        env,
        train={"include": {"idx": f":{TRAINING}"}, "shuffle": True},
        eval={"include": {"idx": f"{TRAINING}:"}, "limit": 100},
    )


def main(overrides: Sequence[str]) -> TuneResult:
    """Train, and say what was gained."""
    result = tune(environment=environment(), config_path=HERE / "config.yaml", overrides=overrides)
    print(result)
    return result


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
