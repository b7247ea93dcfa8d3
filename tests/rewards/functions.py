"""Reward functions that behave badly; a new interpreter imports this file."""

import builtins
import os
import signal
import threading


def length(answer: str, *, scale: float = 1.0) -> float:
    return len(answer) * scale


def hang(answer: str) -> float:
    threading.Event().wait()
    return 1.0


def hang_after(pipe: str) -> float:
    """Says in the pipe which process hangs now."""
    with open(pipe, "w") as writer:
        writer.write(str(os.getpid()))
    return hang("")


def die(answer: str) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def fail(answer: str) -> float:
    raise ValueError(f"no reward for {answer!r}")


def process_id() -> int:
    return os.getpid()


def raise_named(error):
    raise vars(builtins)[error]("odd")
