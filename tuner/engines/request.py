"""The state of one completion in an engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from tuner.engines.base import (
    DescribedEngine,
    EngineCapabilities,
    EngineError,
    EngineStats,
    FinishReason,
    Generation,
    SamplingError,
    SamplingParams,
    TokenSink,
)
from tuner.engines.grammar import Grammars, GrammarState, unpacked
from tuner.engines.grammar_text import GrammarError
from tuner.engines.images import ALBUM, IMAGE_IDS
from tuner.engines.sampling import (
    Edit,
    LogitEdits,
    SamplingBatch,
    choose,
    edited,
    most_probable,
    packed_kept,
)
from tuner.engines.stop_strings import StopStrings
from tuner.errors import ContextLengthError

P = TypeVar("P", bound="Progress")


@dataclass(eq=False)
class Progress:
    """A prompt, its settings and the tokens sampled so far.

    Attributes:
        prompt_ids: Token ids, shape [P].
        limit: Maximum number of sampled tokens: `max_tokens`, or less at the end of the context.
        end_ids: Token ids that end a completion.
        sink: Receives each token.
        cached_tokens: Prompt tokens reused when the request was first admitted; -1 before that.
        cancelled: Nobody waits for it any more.
        adapter: Name of its adapter; None: as in `Engine.generate`.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    limit: int
    end_ids: frozenset[int]
    stops: StopStrings | None
    sink: TokenSink | None = None
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    cached_tokens: int = -1
    finish_reason: FinishReason | None = None
    cancelled: bool = False
    adapter: str | None = None

    def token_ids(self) -> list[int]:
        """Prompt and completion so far, on which the next token depends."""
        return self.prompt_ids + self.completion_ids

    def push(self, token_id: int, logprob: float, version: int) -> bool:
        """Take a sampled token; True if it was the last one."""
        if self.sink is not None and not self.sink.push(token_id, logprob, version):
            self.cancelled = True
            return False
        self.completion_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token_id in self.end_ids or (self.stops is not None and self.stops.push(token_id)):
            self.finish_reason = "stop"
        elif len(self.completion_ids) >= self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def go_on(self, so_far: Generation) -> None:
        """Take over the first tokens of the completion, which were sampled earlier."""
        self.completion_ids += so_far.completion_ids
        self.logprobs += so_far.logprobs
        self.versions += so_far.versions
        self.top_logprobs += so_far.top_logprobs
        self.kept += so_far.kept
        if self.stops is not None:
            for token_id in so_far.completion_ids:
                self.stops.push(token_id)

    def generation(self) -> Generation:
        assert self.finish_reason is not None
        return Generation(
            completion_ids=tuple(self.completion_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            finish_reason=self.finish_reason,
            top_logprobs=tuple(self.top_logprobs),
            cached_tokens=self.cached_tokens,
            kept=tuple(self.kept),
        )


@dataclass(eq=False, kw_only=True)
class Request(Progress):
    """A completion that is sampled in this process.

    Attributes:
        uniforms: The request's own random stream; one number is drawn per sampled token.
        future: Receives the Generation, on the event loop of the caller.
        form: Position in its grammar; None without one.
        edits: Changes of single logits; None if there are none.
        error: Why it cannot continue, although the others of its batch can.
        number: Order of arrival.
    """

    uniforms: Random
    future: asyncio.Future[Generation]
    form: GrammarState | None = None
    edits: LogitEdits | None = field(init=False, default=None)
    error: EngineError | GrammarError | ContextLengthError | None = None
    number: int = 0

    def __post_init__(self) -> None:
        if self.sampling.edits_logits:
            self.edits = LogitEdits(self.sampling, self.prompt_ids, self.completion_ids)

    @property
    def abandoned(self) -> bool:
        """Whether nobody can receive the result any more."""
        return self.cancelled or self.future.get_loop().is_closed()

    def settle(self, outcome: Generation | EngineError | GrammarError | ContextLengthError) -> None:
        """Give the result or the error to the caller, from any thread."""

        def deliver() -> None:
            if self.future.done():
                return
            if isinstance(outcome, Exception):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)

        with suppress(RuntimeError):  # the event loop was closed: nobody waits
            self.future.get_loop().call_soon_threadsafe(deliver)

    def go_on(self, so_far: Generation) -> None:
        """Like `Progress.go_on`; raises GrammarError if the grammar does not allow the tokens."""
        super().go_on(so_far)
        if self.form is not None:
            for token_id in so_far.completion_ids:
                self.form.advance(token_id)

    def push(self, token_id: int, logprob: float, version: int) -> bool:
        """Take a sampled token; True if it was the last one or nothing can follow it."""
        finished = super().push(token_id, logprob, version)
        if self.form is not None and not self.cancelled:
            try:
                self.form.advance(token_id)
            except GrammarError as error:
                self.error = error
                return True
        return finished


class RequestEngine(DescribedEngine):
    """Base class of engines that handle a request from its first token to its last.

    Args:
        tokenizer: For stop strings and grammars.
        end_ids: Token ids that end a completion.
        vocabulary: Number of token ids that the model knows.
        max_model_len: Maximum of prompt and completion tokens of one request.
        version: Version of the current weights.
        grammars: Whether our grammars are followed exactly.
        shares_weights, every_setting, goes_on, images: As in `EngineCapabilities`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: frozenset[int],
        vocabulary: int,
        max_model_len: int,
        version: int,
        grammars: bool,
        shares_weights: bool,
        every_setting: bool,
        goes_on: Literal["in_parts", "always"],
        images: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._vocabulary = vocabulary
        self._version = version
        self._grammars = Grammars(tokenizer, end_ids)
        self._capabilities = EngineCapabilities(
            max_model_len=max_model_len,
            grammars=grammars and Grammars.supports(tokenizer),
            end_ids=end_ids,
            shares_weights=shares_weights,
            every_setting=every_setting,
            goes_on=goes_on,
            images=images,
        )
        if self._capabilities.grammars:
            self._grammars.prepare()
        self._stats = EngineStats()
        self._closed = False

    @property
    def grammars(self) -> Grammars:
        return self._grammars

    def _begun(
        self,
        kind: type[P],
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        sink: TokenSink | None,
        so_far: Generation | None,
        **own: Any,
    ) -> P:
        """Create a request of `kind`, with its `own` fields, after checking ids and settings."""
        if sampling.rare and not self._capabilities.every_setting:
            raise SamplingError(sampling.rare[0], "is not supported by this engine")
        prompt, longest = list(prompt_ids), self._capabilities.max_model_len
        if len(prompt) >= longest:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_model_len is {longest}: no room for "
                "a single token; raise model.max_model_len or shorten the prompt"
            )
        if not prompt:
            raise EngineError("the prompt is empty: a model needs at least one token")
        named = [*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)]
        named += [token for word in sampling.bad_words for token in word]
        begun = list(so_far.completion_ids) if so_far is not None else []
        seen = range(IMAGE_IDS, ALBUM.end) if self._capabilities.images else ()
        for what, ids in (
            ("the prompt has", [i for i in prompt if i not in seen]),
            ("the sampling settings name", named),
            ("the completion has", begun),
        ):
            if ids and (min(ids) < 0 or max(ids) >= self._vocabulary):
                wrong = next(i for i in ids if not 0 <= i < self._vocabulary)
                raise EngineError(
                    f"{what} token id {wrong}, but the model knows 0 to "
                    f"{self._vocabulary - 1}: is the tokenizer the model's own?"
                )
        progress = kind(
            prompt_ids=prompt,
            sampling=sampling,
            limit=min(sampling.max_tokens, longest - len(prompt)),
            end_ids=self._end_ids.union(sampling.stop_token_ids),
            stops=StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None,
            sink=sink,
            **own,
        )
        if so_far is not None:
            if not self._capabilities.can_go_on(sampling):
                raise EngineError(
                    "this engine cannot continue a partial completion that has a grammar or whose "
                    "tokens are counted (penalties, bad_words)"
                )
            if len(begun) >= progress.limit or progress.end_ids.intersection(begun):
                raise EngineError(
                    f"a completion of {len(begun)} tokens, of {progress.limit} at most, has ended: "
                    "there is nothing to continue"
                )
            progress.go_on(so_far)
        return progress


def end_ids_of(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids named by the model's generation settings and the tokenizer, either of
    which may be None."""
    ids: list[int] = []
    for one in (generation_config, tokenizer):
        named = getattr(one, "eos_token_id", None)
        ids += [] if named is None else named if isinstance(named, list) else [named]
    return frozenset(ids)


def sample_next(
    requests: Sequence[Request], batch: SamplingBatch, logits: Tensor, version: int
) -> tuple[list[int], list[int]]:
    """Sample the next token of every request and hand it over.

    Args:
        logits: Shape [n, V], one row per request.
        batch: The requests' settings, in the same order.

    Returns:
        The sampled ids, [n], and the positions in `requests` of the finished ones, ascending. A
        request whose grammar cannot be followed any further is finished with its error.

    Raises:
        EngineError: The logits are not finite; no request has changed.
    """
    if batch.constrained:
        logits = _within_grammars(requests, batch.constrained, logits)
    if batch.edited:
        logits = edited(logits, [(place, _edit(requests[place])) for place in batch.edited])
    logprobs = batch.logprobs(logits)
    ids, chosen = choose(logprobs, [request.uniforms.random() for request in requests])
    if not math.isfinite(math.fsum(chosen)):
        raise EngineError(
            "the model's logits are not finite (NaN or infinite), so nothing can be sampled: "
            "the weights have diverged; lower the learning rate or start from a checkpoint"
        )
    if batch.top_logprobs:
        alternatives = most_probable(logprobs, batch.top_logprobs)
        for request, pairs in zip(requests, alternatives, strict=True):
            if request.sampling.top_logprobs:
                request.top_logprobs.append(tuple(pairs[: request.sampling.top_logprobs]))
    if batch.cut:
        left = (logprobs[list(batch.cut)] > -math.inf).cpu().numpy()
        for place, row in zip(batch.cut, left, strict=True):
            requests[place].kept.append(packed_kept(np.flatnonzero(row), len(row)))
    finished = [
        place
        for place, (request, token_id, logprob) in enumerate(
            zip(requests, ids, chosen, strict=True)
        )
        if request.error is not None or request.push(token_id, logprob, version)
    ]
    return ids, finished


def _edit(request: Request) -> Edit:
    assert request.edits is not None
    return request.edits.after(len(request.completion_ids))


def _within_grammars(
    requests: Sequence[Request], constrained: Sequence[int], logits: Tensor
) -> Tensor:
    """Logits [n, V] with -inf outside the grammars of the requests at the places `constrained`."""
    places, masks = [], []
    for place in constrained:
        form = requests[place].form
        assert form is not None
        try:
            masks.append(form.mask(logits.shape[-1]))
            places.append(place)
        except GrammarError as error:
            requests[place].error = error
    if not places:
        return logits
    removed = torch.zeros_like(logits, dtype=torch.bool)
    removed[places] = ~unpacked(np.stack(masks), logits.shape[-1], logits.device)
    return logits.masked_fill(removed, -math.inf)


@dataclass(eq=False, kw_only=True)
class Flight(Progress):
    """A request and the part of it that is being sampled in another process."""

    loop: asyncio.AbstractEventLoop
    wake: asyncio.Event
    part: asyncio.Task[None] | None = None

    def end_part(self) -> None:
        part = self.part  # which the request's own thread may clear meanwhile
        if part is not None:
            with suppress(RuntimeError):  # its loop was closed: nobody waits
                self.loop.call_soon_threadsafe(part.cancel)

    def wake_up(self) -> None:
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.wake.set)

    @property
    def running(self) -> bool:
        return self.part is not None and not self.loop.is_closed()
