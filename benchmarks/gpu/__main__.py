"""Every check that needs a GPU, in slices of at most 8 minutes, the most valuable first.

    make gpu [SLICE=2] [ARGS=...]
    python3 -m benchmarks.gpu [--slice 2 ...] [--only layouts ...] [--rehearse] [--again]

It needs PyTorch with CUDA, transformers, pebble and what `tests` imports; what else is missing is
skipped by name. Each check has a process of its own, and what became of it is written at once to
`benchmarks/results/gpu/slice_<n>.json`; one that passed is not run again with the same code,
versions and hardware. `--rehearse` runs all of it on a CPU with toy sizes, and writes nothing.
`--write-docs` writes benchmarks/on_a_gpu.md from these files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, TimeoutError, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from benchmarks._report import RESULTS, cells, circumstances, write
from benchmarks.gpu.check import CHECKS, ROOT, SLICES, Check, Result, attempt

FOLDER = RESULTS / "gpu"
PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "vllm", "trinity-rft")
PRELOADED = ["benchmarks.gpu.correct", "benchmarks.gpu.trainer", "benchmarks.gpu.generation"]
"""What is imported once for all processes; none of it touches CUDA."""
AFTER = 60
"""Seconds that a slice goes on after no more checks begin."""
AT_ONCE = 8
"""Checks of slice 1 at the same time: most of their time is the compiler's, on the CPU."""


def here() -> dict[str, object]:
    """What the results were found with; all but the date and the commit decide whether they still
    count."""
    digest = hashlib.sha256()
    for folder in ("benchmarks", "tuner", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.getoutput(shlex.join(git)) if (ROOT / ".git").exists() else "unknown"
    return {**circumstances(PACKAGES), "commit": commit, "code": digest.hexdigest()[:16]}


def results_of(path: Path) -> dict[str, dict[str, Any]]:
    """What became of each check, by its name."""
    if not path.exists():
        return {}
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["checks"]
    return found


def run_slice(
    number: int,
    checks: Sequence[Check],
    folder: Path,
    *,
    device: str,
    minutes: float = 8.0,
    processes: int = 1,
    again: bool = False,
) -> bool:
    """Run what has not passed yet, and write what became of each as it ends.

    Returns:
        Whether none of them failed.
    """
    path, now = folder / f"slice_{number}.json", {**here(), "device": device}
    found = results_of(path)
    told = ("hardware", "versions", "code", "device")
    done = {
        name
        for name, result in found.items()
        if result["outcome"] == "passed" and all(result["here"].get(k) == now[k] for k in told)
    }
    left = [check for check in checks if again or check.name not in done]
    print(f"slice {number}, {SLICES[number]}: {len(left)} of {len(checks)} checks", flush=True)
    good = True
    for check, result in _results(left, device, minutes * 60, processes):
        found[check.name] = {**asdict(result), "here": now}
        write(path, {"slice": number, "checks": found})
        good &= result.outcome not in ("failed", "error")
        line = f"{result.outcome:8} {result.seconds:6.1f} s  {check.name}"
        print(f"{line}: {result.why}" if result.why else line, flush=True)
        for row in result.rows:
            print("    " + "  ".join(filter(None, cells(row))), flush=True)
    return good


def _results(
    checks: Sequence[Check], device: str, seconds: float, processes: int
) -> Iterator[tuple[Check, Result]]:
    """Each check in a process that may crash or hang; none begins after `seconds`."""
    context: Any = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    last = time.monotonic() + seconds
    with (
        ProcessPool(processes, max_tasks=1, context=context) as pool,
        ThreadPoolExecutor(processes) as threads,
    ):

        def one(check: Check) -> Result:
            if time.monotonic() > last:
                return Result("not run", f"{seconds / 60:g} minutes were over")
            started = time.perf_counter()
            limit = min(check.limit, last - time.monotonic() + AFTER)
            try:
                task = pool.schedule(attempt, args=(check, device), timeout=limit)
                result: Result = task.result()
                return result
            except TimeoutError:
                why = f"not done after {limit:.0f} s"
            except ProcessExpired as died:
                why = f"its process ended: {died}"
            return Result("error", why, round(time.perf_counter() - started, 1))

        running = {threads.submit(one, check): check for check in checks}
        for task in as_completed(running):
            yield running[task], task.result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--slice", type=int, nargs="*", choices=SLICES, default=list(SLICES))
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names of checks")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with toy sizes")
    parser.add_argument("--again", action="store_true", help="what has passed, too")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="for beginning checks of a slice"
    )
    parser.add_argument("--into", type=Path, help="folder of the results")
    parser.add_argument("--write-docs", action="store_true", help="write benchmarks/on_a_gpu.md")
    options = parser.parse_args(arguments)
    if options.write_docs:
        from benchmarks._readme import HERE, gpu_page

        (HERE / "on_a_gpu.md").write_text(gpu_page(), encoding="utf-8")
        return 0
    cores = os.cpu_count() or 1
    at_once = min(AT_ONCE, cores)
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, str(cores // at_once))
    # Whether there is a GPU is asked without touching it, or no process could be forked for it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if not options.rehearse:
        import torch

        if not torch.cuda.is_available():
            print("there is no GPU that PyTorch can use; --rehearse runs on the CPU")
            return 2
    good = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.into or (Path(temporary) if options.rehearse else FOLDER)
        for number in options.slice:
            chosen = [
                check
                for check in CHECKS
                if check.slice == number and check.name.startswith(tuple(options.only))
            ]
            good &= run_slice(
                number,
                chosen,
                folder,
                device="cpu" if options.rehearse else "cuda",
                minutes=options.minutes,
                processes=at_once if options.rehearse or number == 1 else 1,
                again=options.again,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
