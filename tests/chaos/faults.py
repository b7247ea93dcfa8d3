"""Let every file operation of a small run fail, one after the other, and let the run go on.

    OMP_NUM_THREADS=1 python -m tests.chaos.preload tests.chaos.faults
        [--kinds full error torn killed] [--every 1] [--seed 0]

As SQLite tests itself: for each kind of fault (`faults.c`) and every n, the nth operation that a
run does below its directory meets it, in Python, PyTorch or Rust alike. The run must end with a
TunerError that names a path there, or go on where that is meant to be harmless; nothing
half-written is left under a final name; and the run that is begun again, without faults, ends with
the bits of one that met none. What is tried is a whole run, and one that goes on from a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.runs import (
    Ended,
    begin,
    differences,
    end,
    left,
    tiny,
    unsound,
    warm_up,
    with_models,
)

KINDS = {"full": 1, "error": 2, "torn": 3, "killed": 4}


class Faults:
    """Tries runs below a folder.

    Attributes:
        tried: How often a run ended in which way, by case, kind and way.
        harmless: Operations whose failure did not stop a run.
        wrong: What was not as it should be.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.library = ctypes.CDLL(None)
        self.tried = Counter[tuple[str, str, str]]()
        self.harmless = Counter[tuple[str, str]]()
        self.wrong: list[str] = []
        folder = self.fresh(going_on=False)
        ended = end(begin(tiny, folder))
        if ended.code:
            raise RuntimeError(folder.with_suffix(".log").read_text()[-5000:])
        self.straight = left(folder)
        # Killed in its second step: it goes on from a checkpoint and a torn trace.
        calls = self.operations("killed", going_on=False)
        place = next(n for n, call in enumerate(calls) if "write /run/traces/step_000002" in call)
        self._faulty(self.fresh(going_on=False), "killed", place + 1)
        shutil.copytree(folder / "p", root / "half")

    def fresh(self, going_on: bool) -> Path:
        """The folder of a run, always the same: its path is in its configuration."""
        folder = self.root / "tried"
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)
        with_models(folder, self.root / "models")
        if going_on:
            shutil.copytree(self.root / "half", folder / "p")
        return folder

    def operations(self, kind: str, going_on: bool) -> list[str]:
        """What a run does that counts for a kind, without a fault."""
        folder = self.fresh(going_on)
        self._faulty(folder, kind, 0)
        return self._log(folder)

    def _faulty(self, folder: Path, kind: str, nth: int) -> Ended:
        def start(folder: Path) -> None:
            log = os.open(folder.with_suffix(".calls"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            watched = str(folder / "p").encode()
            self.library.faults_arm(watched, KINDS[kind], ctypes.c_long(nth), log)
            try:
                tiny(folder)
            finally:
                self.library.faults_arm(b"", 0, ctypes.c_long(0), -1)

        return end(begin(start, folder))

    def _log(self, folder: Path) -> list[str]:
        return folder.with_suffix(".calls").read_text().splitlines()

    def meet(self, kind: str, nth: int, *, going_on: bool) -> None:
        """Let a run meet one fault, and go on without."""
        folder = self.fresh(going_on)
        ended = self._faulty(folder, kind, nth)
        calls = self._log(folder)
        call = calls[nth - 1] if len(calls) >= nth else "nothing"
        case = "going on" if going_on else "whole"
        about = f"{case}, {kind} at {call}: {ended.code} {ended.error}"
        wrong = unsound(folder)
        if ended.code == 0:
            way = "goes on"
        elif ended.code == -9 and kind == "killed":
            way = "killed"
        elif ended.code == 1 and ended.wanted and str(folder / "p" / "run") in ended.error:
            way = "error"
        else:
            way = "other"
            wrong.append(folder.with_suffix(".log").read_text()[-3000:])
        again = end(begin(tiny, folder))
        if again.code:
            wrong.append(f"it does not go on: {again.error}")
        else:
            wrong += unsound(folder) or differences(left(folder), self.straight)
        self.tried[case, kind, way] += 1
        if way == "goes on":
            self.harmless[kind, call.partition(" ")[2]] += 1
        if wrong:
            self.wrong.append(f"{about}: {wrong}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--every", type=int, default=1, help="one of so many operations, drawn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began, rng = time.perf_counter(), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        warm_up(Path(temporary))
        faults, told = Faults(Path(temporary)), 0
        operations = {
            (kind, going_on): len(faults.operations(kind, going_on))
            for kind in arguments.kinds
            for going_on in (False, True)
        }
        every = [(*case, n) for case, count in operations.items() for n in range(1, count + 1)]
        drawn = rng.sample(every, -(-len(every) // arguments.every))
        with contextlib.suppress(KeyboardInterrupt):  # what was tried is told
            for number, (kind, going_on, nth) in enumerate(drawn):
                faults.meet(kind, nth, going_on=going_on)
                print(*faults.wrong[told:], sep="\n", end="", flush=True)
                told = len(faults.wrong)
                if number % 50 == 0:
                    print(f"{number} of {len(drawn)}", flush=True)
    print("run | fault | operations | tried | ended with an error | killed | went on")
    print("--- | " * 6 + "---")
    for (kind, going_on), count in operations.items():
        case = "going on" if going_on else "whole"
        ways = [faults.tried[case, kind, way] for way in ("error", "killed", "goes on")]
        print(f"{case} | {kind} | {count} | {sum(ways)} | {' | '.join(map(str, ways))}")
    print("\nwhat a run went on after:")
    for (kind, call), count in sorted(faults.harmless.items()):
        print(f"{kind}: {call} ({count})")
    print(
        f"\n{faults.tried.total()} faults, {len(faults.wrong)} wrong "
        f"(one of {arguments.every}, seed {arguments.seed}, {time.perf_counter() - began:.0f} s)"
    )
    return int(bool(faults.wrong))


if __name__ == "__main__":
    sys.exit(main())
