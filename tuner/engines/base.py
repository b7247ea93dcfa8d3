"""What an engine is: completion ids from prompt ids, with some version of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tuner.errors import TunerError

if TYPE_CHECKING:
    from tuner.engines.grammar import Grammars

FinishReason = Literal["stop", "length"]
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class EngineError(TunerError, RuntimeError):
    """A completion could not be finished: the engine failed or was closed; the cause is chained."""


class EngineLostError(EngineError):
    """The process that generated has died or cannot be reached; the message ends with its log."""


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled. Travels with the call, so that training can recompute it.

    Attributes:
        temperature: 0 is greedy: the most probable token, whose log-prob is then 0.
        top_p: Nucleus mass in (0, 1]; 1 keeps every token. Applied after temperature and top_k.
        top_k: Keep the k most probable tokens; -1 keeps every token.
        max_tokens: Upper limit of sampled tokens, at least 1.
        stop: Strings that end the completion; the tokens that spell them stay in the ids.
        seed: Seed of this completion's own random stream; equal seeds and equal
            distributions give equal tokens, whoever else is in the batch.
        top_logprobs: How many alternatives to report for each position (0 to 20).
        grammar: The form that the completion must have, in llguidance's variant of Lark; empty
            for none. Tokens outside it are removed from the logits before anything else.
        min_p: Keep the tokens that are at least this share as probable as the most probable one;
            applied before top_k and top_p.
        repetition_penalty: Divides the logits above 0 of tokens that are in prompt or completion,
            and multiplies the others; 1 changes nothing.
        presence_penalty: Taken off the logits of tokens that are in the completion.
        frequency_penalty: Likewise, once for each time that they are.
        logit_bias: (id, what is added to its logit), before penalties.
        bad_words: Token ids of texts whose last token cannot follow the others in the completion.
        stop_token_ids: Token ids that end the completion besides the engine's own.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int = 0
    top_logprobs: int = 0
    grammar: str = ""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    @property
    def cuts(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary that depends on the weights."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def edits_logits(self) -> bool:
        """Whether single logits are changed before anything else (`tuner.engines.sampling`)."""
        return bool(self.repetition_penalty != 1 or self.logit_bias or self._counts_completion)

    @property
    def in_one_part(self) -> bool:
        """Whether a completion cannot be continued as if it were a part of its prompt."""
        return bool(self.grammar or self._counts_completion)

    @property
    def _counts_completion(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.bad_words)

    @property
    def rare(self) -> tuple[str, ...]:
        """The settings in force that only an engine with `every_setting` honours, by name."""
        return tuple(name for name, none in _rare() if getattr(self, name) != none)


@cache
def _rare() -> list[tuple[str, Any]]:
    """The settings that not every engine honours, with what changes nothing."""
    names = [field.name for field in fields(SamplingParams)]
    return [(f.name, f.default) for f in fields(SamplingParams)[names.index("min_p") :]]


@dataclass(frozen=True)
class Generation:
    """One completion, exactly as sampled.

    Attributes:
        completion_ids: Sampled token ids, the end-of-sequence token included, shape [T].
        logprobs: Natural log-probs of the sampled ids under the distribution that was sampled
            from (after grammar, penalties, temperature and cuts), shape [T].
        versions: Version of the weights that sampled each token, shape [T].
        finish_reason: "stop" at an end-of-sequence token or stop string, "length" otherwise.
        top_logprobs: For each position the (id, log-prob) pairs of the most probable tokens,
            empty unless asked for.
        cached_tokens: Prompt tokens whose keys and values were reused, not computed.
        kept: For each position the tokens that top_k, top_p and min_p left, as
            `tuner.engines.sampling` packs them; empty where nothing was cut.
    """

    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int = 0
    kept: tuple[str, ...] = ()


class TokenSink(Protocol):
    """Sees a completion grow, so that what was sampled is known even if it is never finished."""

    def push(self, token_id: int, logprob: float, version: int) -> bool:
        """Take the next sampled token. Called in order, from any thread, and must not block.

        Returns:
            False if nobody wants the token any more: it does not count as sampled, and the
            request is as good as cancelled.
        """


@dataclass(frozen=True)
class EngineCapabilities:
    """What an engine can do; the gateway refuses what it cannot with a 400 that names it.

    Attributes:
        grammars: Whether completions can be held to a form (`SamplingParams.grammar`).
        end_ids: Token ids that end a completion.
        shares_weights: Whether it reads the trainer's own tensors, which may then change only
            inside `pause()`. One with a copy may generate while the trainer trains.
        every_setting: Whether it honours the settings from `SamplingParams.min_p` on.
        goes_on: From which completions that are begun it can go on (`Engine.generate`'s `so_far`):
            from none, from those that may be continued as if they were a part of the prompt, or
            from all.
    """

    max_model_len: int
    max_top_logprobs: int = 20
    grammars: bool = False
    end_ids: frozenset[int] = frozenset()
    shares_weights: bool = False
    every_setting: bool = False
    goes_on: Literal["never", "in_parts", "always"] = "never"

    def can_go_on(self, sampling: SamplingParams) -> bool:
        """Whether a completion of such settings can be gone on from."""
        in_parts = self.goes_on == "in_parts" and not sampling.in_one_part
        return in_parts or self.goes_on == "always"


@dataclass
class EngineStats:
    """What an engine has done since it was made, and what it is doing now.

    Attributes:
        prompt_tokens_computed: Tokens computed before the first sampled one, and those computed
            again after the weights changed under a request in flight.
        prompt_tokens_reused: Tokens whose keys and values were taken from another request.
        sampled_tokens: Tokens sampled.
        requests: Requests finished.
        steps: Forward passes; 0 where somebody else makes them.
        step_seconds: Seconds in those passes, sampling and bookkeeping included.
        unannounced_updates: Times the weights had changed without `update_weights`. The cache was
            forgotten in time, but the recorded versions are those of the last announced weights.
        restarts: Times a process that had died was started again.
        update_seconds: Seconds of the last `update_weights`.
        running: Requests that hold a slot now.
        waiting: Requests that wait for one now.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    sampled_tokens: int = 0
    requests: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    unannounced_updates: int = 0
    restarts: int = 0
    update_seconds: float = 0.0
    running: int = 0
    waiting: int = 0


class Engine(Protocol):
    """The seam between the gateway and whatever generates."""

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with; starts at 0."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
        so_far: Generation | None = None,
    ) -> Generation:
        """Sample one completion. Cancelling the awaiting task frees the request's slot.

        Every token that is sampled has been pushed into `sink` before this returns.

        Args:
            so_far: The completion's first tokens, sampled before: it goes on behind them, as if
                they were sampled now, and is returned whole. Where `capabilities.can_go_on`.

        Raises:
            ContextLengthError: The prompt leaves no room for a single token.
            GrammarError: The sampling's grammar cannot be compiled or followed.
            EngineError: The engine failed or was closed while the request was in flight; an
                `EngineLostError` where a process of its own died. The next request may succeed.
        """

    def pause(self) -> AbstractAsyncContextManager[None]:
        """Hold generation between two tokens while the block runs (weights may change).

        Requests in flight go on afterwards with the tokens they have, of whatever version.
        """

    async def update_weights(self, version: int) -> None:
        """Serve the weights as they are now under `version`; forget every cached prefix.

        The next token of a request in flight is sampled with the new weights alone: prompt and
        completion so far are computed again.

        Raises:
            EngineError: The engine cannot serve them; it serves nothing else instead.
        """

    async def close(self) -> None:
        """Stop; requests in flight fail."""


class DescribedEngine:
    """What every engine of ours says of itself; who derives from it sets the fields."""

    _version: int
    _capabilities: EngineCapabilities

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with, or was seen last."""
        return self._version

    @property
    def capabilities(self) -> EngineCapabilities:
        """Limits that the gateway enforces."""
        return self._capabilities


class TrainingEngine(Engine, Protocol):
    """What a run of our own needs of its engine besides."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """While the block runs the weights may change, until `update_weights` inside it.

        An engine that shares them, or the device's memory, generates nothing meanwhile. One with
        a copy goes on; it takes nothing from weights that are half changed.
        """

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine was made, as a copy."""

    @property
    def grammars(self) -> Grammars:
        """What it compiles grammars with; the trainer replays completions with the same."""

    @property
    def failure(self) -> EngineError | None:
        """Why no request can succeed any more, or None."""
