"""A few kills and a few faults, drawn with a fixed seed: what `make test` has time for."""

import random
import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import KINDS, Faults
from tests.chaos.kills import Killing
from tests.chaos.runs import warm_up


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        root, rng = Path(temporary), random.Random(0)
        warm_up(root)
        killing = Killing(root / "kills", seed=0)
        for number, name in enumerate(("grpo, saved at each step", "ahead")):
            killing.kill(name, number, most=2)
        faults = Faults(root / "faults")
        for number, kind in enumerate(KINDS):
            faults.meet(kind, rng.randint(1, 60), going_on=bool(number % 2))
    print(f"{killing.total()} kills, {faults.tried.total()} faults")
    print(*killing.wrong, *faults.wrong, sep="\n")
    return int(bool(killing.wrong or faults.wrong))


if __name__ == "__main__":
    sys.exit(main())
