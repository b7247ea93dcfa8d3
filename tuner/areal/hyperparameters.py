"""How answers are sampled, by AReaL's names; read without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from tuner.errors import ConfigError


def setting(default: Any, help: str) -> Any:
    """A field of a dataclass with a default and a line for `--help`."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class GenerationHyperparameters:
    """How answers are sampled.

    AReaL's other fields (`min_new_tokens`, `ignore_eos`, `frequency_penalty`, beams, LoRA names)
    are not taken: nothing here would honour them.

    Attributes:
        n_samples: Answers for each request of a queue agent; `agenerate` gives one. Also `n`.
        max_new_tokens: Limit of one answer, in tokens; the room left in the context is another.
        max_tokens: Limit of prompt and answer together, in tokens.
        greedy: The most probable token each time, whatever `temperature` says; never trained,
            since nothing was drawn.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k most probable tokens; -1 keeps every token.
        temperature: Sampling temperature.
        stop_token_ids: Must be among those that end an answer anyway.
        stop: Strings that end an answer; the tokens that spell them stay in it.
    """

    n_samples: int = setting(1, "answers for each request of a queue agent")
    max_new_tokens: int = setting(16384, "limit of one answer, in tokens")
    max_tokens: int = setting(32768, "limit of prompt and answer together, in tokens")
    greedy: bool = setting(False, "the most probable token each time; never trained")
    top_p: float = setting(1.0, "nucleus mass; 1 keeps every token")
    top_k: int = setting(-1, "keep the k most probable tokens; -1 keeps every token")
    temperature: float = setting(1.0, "sampling temperature")
    stop_token_ids: tuple[int, ...] = setting((), "must be among those that end an answer anyway")
    stop: tuple[str, ...] = setting((), "strings that end an answer")

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name in ("n_samples", "max_new_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1")

    @property
    def n(self) -> int:
        """`n_samples` by its older name."""
        return self.n_samples

    def new(self, **changes: Any) -> Self:
        """A copy with some settings changed; `n` is `n_samples`."""
        if "n" in changes:
            changes["n_samples"] = changes.pop("n")
        return replace(self, **changes)
