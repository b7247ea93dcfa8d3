"""The engine interface: prompt ids in, completion ids out, with a known version of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tuner.errors import ConfigError, TunerError

if TYPE_CHECKING:
    from tuner.engines.grammar import Grammars

FinishReason = Literal["stop", "length"]
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class EngineError(TunerError, RuntimeError):
    """The engine failed or was closed before a completion was finished; the cause is chained."""


# The lowest temperature but 0: logits divided by less, or their gradients, are not finite.
COLDEST = 1e-6


class SamplingError(ConfigError):
    """Settings of a completion that define no distribution, or one that the engine cannot sample.

    Args:
        setting: The field of `SamplingParams`.
        problem: What is wrong with it, and what is allowed; continues a sentence that begins with
            the setting.
    """

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"sampling: {setting} {problem}")
        self.setting, self.problem = setting, problem


class EngineLostError(EngineError):
    """The process that generated has died or cannot be reached; the message ends with its log."""


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled. Recorded with the call, so that training can recompute it.

    Attributes:
        temperature: 0 is greedy: the most probable token, whose log-prob is then 0. Otherwise at
            least 1e-6.
        top_p: Nucleus mass in (0, 1]; 1 keeps every token. Applied after temperature and top_k.
        top_k: Keep the k most probable tokens; -1 keeps every token.
        max_tokens: Upper limit of sampled tokens, at least 1.
        stop: Strings that end the completion; the tokens that spell them stay in the ids.
        seed: Seed of this completion's random stream; equal seeds and equal distributions give
            equal tokens, whatever else is in the batch.
        top_logprobs: How many alternatives to report for each position (0 to 20).
        grammar: Grammar that the completion must follow, in llguidance's variant of Lark; empty
            for none. Tokens outside it are removed from the logits before anything else.
        min_p: Keep tokens whose probability is at least this share of the most probable token's;
            applied before top_k and top_p.
        repetition_penalty: Divides positive logits of tokens that are in prompt or completion and
            multiplies negative ones; 1 changes nothing.
        presence_penalty: Subtracted from the logits of tokens that are in the completion.
        frequency_penalty: Likewise, once for each occurrence.
        logit_bias: (id, value added to its logit), applied before penalties.
        bad_words: Token ids of texts whose last token cannot follow the others in the completion.
        stop_token_ids: Token ids that end the completion, in addition to the engine's.
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
        """Whether a completion cannot be continued as if it were part of its prompt."""
        return bool(self.grammar or self._counts_completion)

    @property
    def _counts_completion(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.bad_words)

    @property
    def rare(self) -> tuple[str, ...]:
        """Names of the active settings that only an engine with `every_setting` supports."""
        return tuple(name for name, none in _rare() if getattr(self, name) != none)


@cache
def _rare() -> list[tuple[str, Any]]:
    """Settings that not every engine supports, each with its neutral value."""
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
    """Receives tokens as they are sampled, so that they are known even if the completion never
    ends."""

    def push(self, token_id: int, logprob: float, version: int) -> bool:
        """Take the next sampled token. Called in order, from any thread; must not block.

        Returns:
            False to cancel: this token does not count as sampled, and the request ends.
        """


@dataclass(frozen=True)
class EngineCapabilities:
    """Features of an engine; the gateway rejects unsupported settings with a 400 that names them.

    Attributes:
        grammars: Whether completions can be constrained by `SamplingParams.grammar`.
        end_ids: Token ids that end a completion.
        shares_weights: Whether it reads the trainer's tensors, which may then change only inside
            `pause()`. An engine with a copy may generate while the trainer trains.
        every_setting: Whether it supports the settings from `SamplingParams.min_p` on.
        goes_on: Which partial completions it can continue (`so_far` of `Engine.generate`): none,
            those that may be treated as part of the prompt ("in_parts"), or all.
        images: Whether prompts may have the ids of images' tokens (`tuner.engines.images`).
    """

    max_model_len: int
    max_top_logprobs: int = 20
    grammars: bool = False
    end_ids: frozenset[int] = frozenset()
    shares_weights: bool = False
    every_setting: bool = False
    goes_on: Literal["never", "in_parts", "always"] = "never"
    images: bool = False

    def can_go_on(self, sampling: SamplingParams) -> bool:
        """Whether a partial completion with these settings can be continued."""
        in_parts = self.goes_on == "in_parts" and not sampling.in_one_part
        return in_parts or self.goes_on == "always"


@dataclass
class EngineStats:
    """Counts since the engine was created, and its current load.

    Attributes:
        prompt_tokens_computed: Tokens computed before the first sampled one, including those
            recomputed after the weights changed during a request.
        prompt_tokens_reused: Tokens whose keys and values were taken from another request.
        sampled_tokens: Tokens sampled.
        drafted_tokens: Tokens computed as a draft, before they were sampled.
        accepted_tokens: Those of them that were then sampled.
        requests: Requests finished.
        steps: Forward passes; 0 for engines that do not count them.
        step_seconds: Seconds in those passes, sampling and bookkeeping included.
        unannounced_updates: Times the weights changed without `update_weights`. The cache was
            dropped in time, but the recorded versions are those of the last announced weights.
        restarts: Times a dead process was restarted.
        update_seconds: Seconds of the last `update_weights`.
        preempted: Times a request gave its slot to one that came before it and needed memory.
        running: Requests that hold a slot now.
        waiting: Requests that wait for a slot now.
    """

    prompt_tokens_computed: int = 0
    prompt_tokens_reused: int = 0
    sampled_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    requests: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    unannounced_updates: int = 0
    restarts: int = 0
    update_seconds: float = 0.0
    preempted: int = 0
    running: int = 0
    waiting: int = 0


class Engine(Protocol):
    """The interface between the gateway and whatever generates."""

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
        adapter: str | None = None,
    ) -> Generation:
        """Sample one completion. Cancelling the awaiting task frees the request's slot.

        Every sampled token has been pushed into `sink` before this returns.

        Args:
            so_far: First tokens of the completion, sampled earlier. Sampling continues after them
                as if they had been sampled now, and the whole completion is returned. Requires
                `capabilities.can_go_on`.
            adapter: Name of the adapter to sample with; None: the model without one, or with its
                only one.

        Raises:
            ContextLengthError: The prompt leaves no room for a single token.
            GrammarError: The grammar cannot be compiled or followed.
            EngineError: The engine failed or was closed during the request; `EngineLostError` if a
                process of the engine died. The next request may succeed.
        """

    def pause(self) -> AbstractAsyncContextManager[None]:
        """Hold generation between two tokens while the block runs, so that weights may change.

        Requests in flight continue afterwards and keep their tokens, whatever their version.
        """

    async def update_weights(self, version: int) -> None:
        """Serve the current weights as `version` and drop every cached prefix.

        The next token of a request in flight is sampled with the new weights alone: its prompt and
        completion so far are recomputed.

        Raises:
            EngineError: The engine cannot serve them; it serves no other weights instead.
        """

    async def close(self) -> None:
        """Stop; requests in flight fail."""


class DescribedEngine:
    """Base class with the properties that every engine reports; subclasses set the fields."""

    _version: int
    _capabilities: EngineCapabilities

    @property
    def version(self) -> int:
        """Version of the weights that samples the next token, or that was last seen."""
        return self._version

    @property
    def capabilities(self) -> EngineCapabilities:
        """Limits that the gateway enforces."""
        return self._capabilities


class TrainingEngine(Engine, Protocol):
    """The additional methods that a local training run needs of its engine."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Let the weights change while the block runs, until `update_weights` inside it.

        An engine that shares them, or the device's memory, generates nothing meanwhile. An engine
        with a copy continues and takes nothing from weights that are partly changed.
        """

    @property
    def stats(self) -> EngineStats:
        """A copy of the counts since the engine was created."""

    @property
    def grammars(self) -> Grammars:
        """The grammar compiler; the trainer replays completions with the same one."""

    @property
    def failure(self) -> EngineError | None:
        """The reason why no request can succeed any more, or None."""
