"""One model invocation as frozen data: exact ids, log-probs, versions and what people read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from tuner.engines.base import SamplingParams
from tuner.traces.reading import AnyNumber, Count, TokenId

Rerendered = Literal["text", "characters", "tokenizer"]
Dialect = Literal["chat", "completions", "responses", "messages"]
ReasoningPolicy = Literal["template", "keep"]


@dataclass(frozen=True)
class Usage:
    """Tokens that were read and written."""

    input_tokens: Count = 0
    output_tokens: Count = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens, self.output_tokens + other.output_tokens
        )


@dataclass(frozen=True)
class Call:
    """One completion that an agent received, exactly as sampled.

    `n=3` in one request makes three calls with the same prompt. A call whose data do not agree
    is kept for viewing with `invalid` set, and is never trained.

    Attributes:
        id: Unique within its session; the response id that the agent saw, plus the choice.
        prompt_ids: Token ids the engine was given, shape [P].
        completion_ids: Token ids the engine sampled, shape [T].
        logprobs: Log-probs of `completion_ids` under the sampled distribution, shape [T].
        versions: Version of the weights for each sampled token, shape [T].
        sampling: The settings in force, after defaults and caps.
        finish_reason: "stop", "length" or "tool_calls", as chat completions say it; "abandoned"
            where it is undelivered.
        messages: The request's messages, as the agent sent them.
        tools: The request's tools, as the agent sent them.
        response: The assistant message that the agent received.
        started: Unix time of the request, seconds.
        seconds: Time until the completion was ready.
        cached_tokens: Prompt tokens the engine did not have to compute.
        reused_ids: How many of `prompt_ids`, from the first on, are the prompt and the sampled
            completion of an earlier call, taken over as they were; the others were rendered.
        rerendered: Why the latest assistant turn of the prompt was rendered and not taken over:
            "text" (no call of the session sampled what the template rendered), "characters"
            (the completion holds bytes that are no text), "tokenizer" (the text cannot be cut
            where the completion ended); None where there is none or it was taken over.
        dialect: Whose form the request came in: OpenAI's chat completions, completions or
            responses, or Anthropic's messages.
        streamed: Whether the answer was a stream.
        role: The agent that made the call, where the workflow named it, or None.
        reward: The call's own reward, in place of its rollout's, or None.
        gained: What was gained where the call ended, for algorithms that add up what calls lead to
            (`turn_discount`, ppo). Where a call of the rollout has it, they add up these alone, and
            neither `reward` nor the rollout's.
        excluded: Whether the workflow said that the call is not to be trained.
        masked: Stretches [from, to) of `completion_ids` that the workflow said are not to be
            trained, in order.
        undelivered: Whether the caller went away, or was cut off, before the end of the answer;
            what was sampled until then is kept, and never trained.
        malformed_tool_calls: Tool calls of the completion that could not be read.
        reasoning_policy: Whether reasoning that is missing from the rendered prompt stays missing
            ("template") or is put back as it was sampled ("keep").
        kept_reasoning_ids: How many of `prompt_ids` are reasoning of earlier turns, its tags
            included, of which the rendered prompt shows nothing: what "keep" costs.
        recomputed_ids: How many of `prompt_ids` are the earlier turns, from the first one on that
            lacks its reasoning, which "keep" would have taken over: what "template" costs.
        kept: For each position the tokens that top_k, top_p and min_p left, as
            `tuner.engines.sampling` packs them, "" where they are not known; empty where nothing
            was cut.
        top_logprobs: For each position the (id, log-prob) pairs of the most probable tokens, where
            the request asked for them.
        replayed: How many of `completion_ids`, from the first on, were not sampled for this call:
            its session's script gave them, from a call of another rollout, which they count for.
        billed: What a model elsewhere says that it read and wrote, as tokens of its own, whose ids
            are not known; None where they are.
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
    billed: Usage | None = None
    invalid: str | None = field(default=None)

    @property
    def usage(self) -> Usage:
        """The tokens of its prompt and of its completion."""
        return self.billed or Usage(len(self.prompt_ids), len(self.completion_ids))

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the engine sampled for this call."""
        return len(self.completion_ids) - self.replayed

    @property
    def given_back(self) -> bool:
        """Whether another rollout sampled all of it, and counts it."""
        return 0 < self.replayed == len(self.completion_ids)

    @property
    def constrained(self) -> bool:
        """Whether the completion was held to a form; `sampling.grammar` says to which."""
        return bool(self.sampling.grammar)

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """The stretches [from, to) of `completion_ids` that are left when what was replayed and
        `masked` are taken out."""
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
