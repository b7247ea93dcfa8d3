"""One model call as frozen data: exact ids, log-probs and versions, and the readable messages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tuner.engines.base import SamplingParams
from tuner.engines.images import ALBUM, ImageSpan
from tuner.traces.reading import AnyNumber, Count, TokenId

Rerendered = Literal["text", "characters", "tokenizer", "end"]
Dialect = Literal["chat", "completions", "responses", "messages"]
ReasoningPolicy = Literal["template", "keep"]


@dataclass(frozen=True)
class Usage:
    """Number of prompt and completion tokens."""

    input_tokens: Count = 0
    output_tokens: Count = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens
        )


@dataclass(frozen=True)
class Call:
    """One completion that an agent received, exactly as sampled.

    `n=3` in one request makes three calls with the same prompt. A call with inconsistent data is
    kept for viewing with `invalid` set, and is never trained.

    Attributes:
        id: Unique within its session; the response id that the agent saw, plus the choice.
        prompt_ids: Token ids the engine was given, shape [P].
        completion_ids: Token ids the engine sampled, shape [T].
        logprobs: Log-probs of `completion_ids` under the sampled distribution, shape [T].
        versions: Version of the weights for each sampled token, shape [T].
        sampling: The effective settings, after defaults and caps.
        finish_reason: "stop", "length" or "tool_calls", as in chat completions; "abandoned" if it
            is undelivered.
        messages: The request's messages, as the agent sent them.
        tools: The request's tools, as the agent sent them.
        response: The assistant message that the agent received.
        started: Unix time of the request, seconds.
        seconds: Time until the completion was ready.
        cached_tokens: Prompt tokens the engine did not have to compute.
        reused_ids: Number of `prompt_ids`, from the first on, that were copied from the prompt and
            the sampled completion of an earlier call; the others were rendered.
        rerendered: Why the latest assistant turn of the prompt was rendered and not copied:
            "text" (no call of the session sampled what the template rendered), "characters"
            (the completion contains bytes that are not text), "tokenizer" (the text cannot be cut
            where the completion ended), "end" (the template ends it with another token, and all
            but the sampled end token was copied); None if there is no such turn or it was copied.
        dialect: Format of the request: OpenAI's chat completions, completions or responses, or
            Anthropic's messages.
        streamed: Whether the answer was a stream.
        role: The agent that made the call, if the workflow named it, or None.
        reward: The call's own reward, in place of its rollout's, or None.
        gained: The reward gained at the end of the call, for algorithms that sum up the returns of
            calls (`turn_discount`, ppo). If a call of the rollout has it, they sum up only these,
            and neither `reward` nor the rollout's reward.
        state: The state of the environment in which the call was made, for `gigpo`; None: its
            prompt is its state.
        excluded: Whether the workflow excluded the call from training.
        masked: Stretches [from, to) of `completion_ids` that the workflow excluded from training,
            in order.
        undelivered: Whether the caller disconnected, or was cut off, before the end of the answer;
            tokens sampled until then are kept, and never trained.
        malformed_tool_calls: Number of unreadable tool calls in the completion.
        reasoning_policy: Whether reasoning that is missing from the rendered prompt stays missing
            ("template") or is restored as sampled ("keep").
        kept_reasoning_ids: Number of `prompt_ids` that are reasoning of earlier turns, with its
            tags, and missing from the rendered prompt: the cost of "keep".
        recomputed_ids: Number of `prompt_ids` in the earlier turns, from the first one on that
            lacks its reasoning, which "keep" would have copied: the cost of "template".
        kept: For each position the tokens that top_k, top_p and min_p kept, packed by
            `tuner.engines.sampling`, "" if unknown; empty if nothing was cut.
        top_logprobs: For each position the (id, log-prob) pairs of the most probable tokens, if the
            request asked for them.
        replayed: Number of `completion_ids`, from the first on, that were not sampled for this
            call:
            its session's script copied them from a call of another rollout, which counts them.
        images: Where `prompt_ids` holds placeholders of images, in order.
        billed: Token counts reported by a remote model, whose ids are unknown; None if the ids are
            known.
        invalid: Why the call can never be trained, or None.
    """

    id: str
    prompt_ids: tuple[TokenId, ...]
    completion_ids: tuple[TokenId, ...]
    logprobs: tuple[AnyNumber, ...]
    versions: tuple[Count, ...]
    sampling: SamplingParams
    finish_reason: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    response: dict[str, Any]
    started: float
    seconds: float
    cached_tokens: Count = 0
    reused_ids: Count = 0
    rerendered: Rerendered | None = None
    dialect: Dialect = "chat"
    streamed: bool = False
    role: str | None = None
    reward: float | None = None
    gained: float | None = None
    state: str | None = None
    excluded: bool = False
    masked: tuple[tuple[Count, Count], ...] = ()
    undelivered: bool = False
    malformed_tool_calls: Count = 0
    reasoning_policy: ReasoningPolicy = "template"
    kept_reasoning_ids: Count = 0
    recomputed_ids: Count = 0
    kept: tuple[str, ...] = ()
    top_logprobs: tuple[tuple[tuple[TokenId, AnyNumber], ...], ...] = ()
    replayed: Count = 0
    images: tuple[ImageSpan, ...] = ()
    billed: Usage | None = None
    invalid: str | None = field(default=None)

    @property
    def usage(self) -> Usage:
        """Number of tokens of its prompt and of its completion."""
        return self.billed or Usage(len(self.prompt_ids), len(self.completion_ids))

    @property
    def compared(self) -> Call:
        """The call as it is compared with others in this process: each image's tokens have ids of
        its own (`tuner.engines.images`)."""
        if not self.images:
            return self
        return replace(self, prompt_ids=ALBUM.compared(self.prompt_ids, self.images), images=())

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the engine sampled for this call."""
        return len(self.completion_ids) - self.replayed

    @property
    def given_back(self) -> bool:
        """Whether another rollout sampled, and counts, all of it."""
        return 0 < self.replayed == len(self.completion_ids)

    @property
    def constrained(self) -> bool:
        """Whether a grammar constrained the completion; see `sampling.grammar`."""
        return bool(self.sampling.grammar)

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Stretches [from, to) of `completion_ids` without replayed and `masked` ones."""
        edges = [0, *(edge for stretch in self.masked for edge in stretch)]
        edges.append(len(self.completion_ids))
        pairs = zip(edges[::2], edges[1::2], strict=True)
        sampled = ((max(start, self.replayed), stop) for start, stop in pairs)
        return tuple((start, stop) for start, stop in sampled if start < stop)

    def __post_init__(self) -> None:
        if self.invalid is None:
            object.__setattr__(self, "invalid", self._inconsistency())

    def _inconsistency(self) -> str | None:
        lengths = {len(self.completion_ids), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            return (
                f"{len(self.completion_ids)} completion ids, {len(self.logprobs)} logprobs and "
                f"{len(self.versions)} versions do not match"
            )
        if self.kept and len(self.kept) != len(self.completion_ids):
            return f"{len(self.completion_ids)} completion ids and {len(self.kept)} kept sets"
        if not self.completion_ids:
            return "no sampled tokens"
        if not self.prompt_ids:
            return "no prompt tokens"
        if not all(math.isfinite(logprob) for logprob in self.logprobs):
            return "a log-prob is not finite"
        return None
