"""Run a module of this folder with the failing file system of `faults.c` before libc.

OMP_NUM_THREADS=1 python -m tests.chaos.preload tests.chaos.faults [ARGUMENTS ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("faults.c")


def run(arguments: list[str], **settings: Any) -> int:
    """The exit code of `python -m <arguments>`; `settings` are those of `subprocess.run`.

    Raises:
        FileNotFoundError: There is no C compiler `cc`.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "faults.so"
        build = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(build, check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(command, env=environment, **settings).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
