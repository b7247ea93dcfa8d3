"""What is checked on a GPU, and how one of these checks is run."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SLICES = {1: "correct", 2: "the trainer", 3: "generation", 4: "Trinity-RFT"}


@dataclass(frozen=True)
class Check:
    """A function of this package that is given "cuda", or "cpu" for toy sizes, and yields rows.

    Attributes:
        name: For people; no two are alike.
        slice: One of SLICES.
        limit: Seconds after which it is stopped.
        function: Its module, in this package or with dots, and name.
        args: What else it is given.
    """

    name: str
    slice: int
    limit: int
    function: str
    args: tuple[Any, ...] = ()


CHECKS = (
    # FlexAttention's kernels are made for each width and dtype, which takes most of the time.
    *(
        Check(f"layouts, {dtype}, heads of {width}", 1, 300, "correct.layouts", (dtype, width))
        for width in (64, 128, 8)
        for dtype in ("bfloat16", "float32")
    ),
    Check("layouts, compiled layers", 1, 400, "correct.layouts", ("float32", 64, True)),
    Check("engine", 1, 200, "correct.engine"),
    Check("waits of an update", 1, 300, "correct.waits"),
    Check("resume", 1, 300, "correct.resume"),
    Check("optimizer in main memory", 1, 300, "correct.offload"),
    Check("LoRA", 1, 300, "correct.lora"),
    Check("a run", 1, 300, "correct.run"),
    Check("the demo", 1, 300, "correct.demo"),
    Check("0.6B, 16k tokens", 2, 150, "trainer.update", (0, 16)),
    Check("0.6B, 2k tokens", 2, 120, "trainer.update", (0, 2)),
    Check("0.6B, 64k tokens", 2, 150, "trainer.update", (0, 64)),
    Check("1.7B, 16k tokens", 2, 150, "trainer.update", (1, 16)),
    Check("0.6B, 16k tokens, by part", 2, 120, "trainer.parts", (0, 16)),
    Check("attention over trees", 2, 120, "trainer.attention"),
    Check("1.7B, 2k tokens", 2, 120, "trainer.update", (1, 2)),
    Check("1.7B, 64k tokens", 2, 150, "trainer.update", (1, 64)),
    Check("0.6B beside TRL", 2, 150, "trainer.beside_trl"),
    Check("distinct prompts, 64 requests", 3, 120, "generation.distinct", (64,)),
    Check("64 requests share 800 tokens", 3, 120, "generation.shared", (64,)),
    Check("a step of a tool agent", 3, 200, "generation.agent"),
    Check("distinct prompts, 16 requests", 3, 120, "generation.distinct", (16,)),
    Check("distinct prompts, 1 request", 3, 120, "generation.distinct", (1,)),
    Check("64 requests beside vLLM", 3, 240, "generation.beside_vllm"),
    Check(
        "vLLM: sleep, CUDA IPC",
        3,
        400,
        "generation.suite",
        ("vllm", "tests/integration/vllm"),
    ),
    Check("colocated", 4, 450, "generation.suite", ("trinity", "tests/integration/trinity")),
)


class Skipped(Exception):
    """What is missing here."""


def require(package: str) -> None:
    """Skip a check for which a package is missing."""
    if importlib.util.find_spec(package) is None:
        raise Skipped(f"{package} is not installed")


@dataclass(frozen=True)
class Result:
    """What became of a check.

    Attributes:
        outcome: "passed"; "failed": a bound was missed; "error"; "skipped": something is missing;
            "not run": there was no time.
        why: Of all but those that passed.
        rows: What it found, as `_report.Row.shown` gives it.
    """

    outcome: str
    why: str = ""
    seconds: float = 0.0
    rows: tuple[dict[str, Any], ...] = ()


def attempt(check: Check, device: str) -> Result:
    """Run it in this process; what it found before it failed is there too."""
    logging.disable(logging.WARNING)  # of random weights and log-probs
    rows: list[dict[str, Any]] = []
    outcome, why, started = "passed", "", time.perf_counter()
    module, _, function = check.function.rpartition(".")
    try:
        found = importlib.import_module(module if "." in module else f"benchmarks.gpu.{module}")
        rows.extend(row.shown() for row in getattr(found, function)(device, *check.args))
        missed = [f"{row['case']}: {row['metric']}" for row in rows if row["met"] is False]
        if missed:
            outcome, why = "failed", "; ".join(missed)
    except Skipped as missing:
        outcome, why = "skipped", str(missing)
    except ModuleNotFoundError as missing:
        outcome, why = "skipped", f"{missing.name} is not installed"
        if str(missing.name).partition(".")[0] in ("tuner", "tests", "benchmarks"):
            outcome, why = "error", str(missing)
    except AssertionError:
        outcome, why = "failed", last_lines(traceback.format_exc())
    except Exception:
        outcome, why = "error", last_lines(traceback.format_exc())
    return Result(outcome, why, round(time.perf_counter() - started, 1), tuple(rows))


def last_lines(text: str, count: int = 12) -> str:
    """The end of what a program said, with paths from the root of the repository."""
    return "\n".join(text.replace(f"{ROOT}/", "").strip().splitlines()[-count:])
