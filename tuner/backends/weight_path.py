"""How new weights get from the trainer to an engine with a copy: by the fastest way there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tuner.errors import ConfigError

PathKind = Literal["cuda_ipc", "nccl", "shared_memory", "disk"]

# Fastest first; the last is always there.
_WORDS: Mapping[PathKind, str] = {
    "cuda_ipc": "vLLM reads them out of the trainer's memory on the GPU that both use",
    "nccl": "they are broadcast from the trainer's GPU to the engine's",
    "shared_memory": "as a checkpoint in this machine's shared memory",
    "disk": "as a checkpoint in the run directory",
}
_BACKENDS: Mapping[PathKind, str] = {"cuda_ipc": "ipc", "nccl": "nccl"}


@dataclass(frozen=True)
class Sides:
    """What trainer and engine have.

    Attributes:
        engine: Where the engine computes: "cpu" (as the trainer does), on "the trainer's gpu", on
            "other gpus" of this machine, or "elsewhere", on servers that somebody else runs.
        adapter: Whether an adapter is trained, and handed over alone.
        backends: The ways from GPU to GPU that the installed vLLM has, by its names.
        size: Bytes of all weights; an adapter's are fewer.
        shared_memory: Bytes that are free in shared memory.
    """

    engine: Literal["cpu", "the trainer's gpu", "other gpus", "elsewhere"]
    adapter: bool
    backends: frozenset[str]
    size: int
    shared_memory: int


@dataclass(frozen=True)
class WeightPath:
    """The way that weights take.

    Attributes:
        why: For people.
    """

    kind: PathKind
    why: str

    def __str__(self) -> str:
        return f"weights: {self.kind}, {_WORDS[self.kind]}; {self.why}"


def choose_weight_path(asked: PathKind | Literal["auto"], sides: Sides) -> WeightPath:
    """The fastest way that both sides have, or the one that was asked for.

    Raises:
        ConfigError: What was asked for cannot be; says why.
    """
    if asked != "auto":
        reason = _obstacle(asked, sides)
        if reason is not None:
            raise ConfigError(
                f"tuner.engine.weights is {asked}, but {reason}: set it to auto, which would be "
                f"{choose_weight_path('auto', sides).kind} here"
            )
        return WeightPath(asked, "asked for")
    passed: list[str] = []
    for kind in _WORDS:
        reason = _obstacle(kind, sides)
        if reason is None:
            return WeightPath(kind, ", ".join(passed) or "nothing is faster")
        passed.append(f"not {kind}: {reason}")
    raise AssertionError("a checkpoint on disk is always possible")


def _obstacle(kind: PathKind, sides: Sides) -> str | None:
    """Why weights cannot take this way; None where they can."""
    if kind == "disk":
        return None
    if sides.engine == "elsewhere":
        return "tuner.engine.urls names servers elsewhere"
    if kind == "shared_memory":
        # Old and new weights are there together for a moment.
        if sides.shared_memory >= 3 * sides.size:
            return None
        return (
            f"/dev/shm has {sides.shared_memory / 2**30:.2f} GiB free, and three times "
            f"{sides.size / 2**30:.2f} GiB are wanted"
        )
    if sides.engine == "cpu":
        return "there is no GPU"
    if kind == "cuda_ipc" and sides.engine == "other gpus":
        return "trainer and engine are on different GPUs"
    if kind == "nccl" and sides.engine == "the trainer's gpu":
        return "trainer and engine share a GPU, and NCCL joins different ones"
    if sides.adapter:
        return "an adapter is trained, which vLLM takes as files"
    if _BACKENDS[kind] not in sides.backends:
        return f"the installed vLLM has no weight transfer {_BACKENDS[kind]!r}"
    return None
