"""What `ServedEngine` generates on: a process that has a copy of the weights."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tuner.engines.base import EngineError, FinishReason, SamplingParams


@dataclass(frozen=True)
class Weights:
    """Weights as a process can load them.

    Attributes:
        folder: A model, or an adapter, in Hugging Face's form. None: they are to be had from the
            trainer's memory alone.
        label: Names them among all weights of all runs. A request says which weights it wants,
            and a process that has others refuses it.
    """

    folder: Path | None
    label: str


@dataclass(frozen=True)
class Sampled:
    """The next tokens of a completion.

    Attributes:
        ids: Token ids, shape [T], T may be 0.
        logprobs: Their log-probs under the distribution that was sampled from, shape [T].
        top_logprobs: For each the most probable (id, log-prob), empty unless asked for.
        cached_tokens: Prompt tokens that were not computed; -1 where it is not said yet.
        finish_reason: Why these are the last ones.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int = -1
    finish_reason: FinishReason | None = None


def finite_logprob(who: str, token: int, value: float) -> float:
    """A sampled token's log-prob, which must be a number.

    Args:
        who: What sampled it, for the message.

    Raises:
        EngineError: It is not finite.
    """
    if not math.isfinite(value):
        raise EngineError(
            f"{who} sampled token {token} with log-prob {value}: the model's logits are not "
            "finite, because the weights have diverged; lower the learning rate or start from a "
            "checkpoint"
        )
    return float(value)


def most_probable(pairs: Iterable[tuple[int, float]], count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most probable (id, log-prob) of those that can be sampled, best first."""
    possible = [(int(token), float(value)) for token, value in pairs if value > -math.inf]
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:count])


class TokenServer(Protocol):
    """One process, or group of processes, that generates.

    `start`, `load`, `sleep` and `stop` block, and are called one at a time; `stream` is called
    from any number of event loops.
    """

    @property
    def name(self) -> str:
        """What messages call it."""

    def start(self, weights: Weights) -> None:
        """Make it serve `weights`, which are in a folder, whether it never ran, has died or runs
        with others.

        Raises:
            EngineLostError: It does not come up; the message ends with its log.
        """

    def sleep(self) -> None:
        """Give back the device's memory. No request is in flight, and none comes before `load`.

        Raises:
            EngineLostError: It died.
            EngineError: It cannot; it serves nothing any more.
        """

    def load(self, weights: Weights) -> None:
        """Serve `weights` instead, and forget every cached prefix. No request is in flight.

        Raises:
            EngineLostError: It died.
            EngineError: It cannot load them; it serves nothing any more.
        """

    def stop(self) -> None:
        """End it, or leave it alone where somebody else started it."""

    def stream(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, label: str
    ) -> AsyncGenerator[Sampled, None]:
        """Sample up to `sampling.max_tokens` tokens with the weights of this label.

        Stop strings are not looked at. Closing the generator ends the completion.

        Raises:
            EngineLostError: It died, or cannot be reached.
            EngineError: It refuses the request.
        """
