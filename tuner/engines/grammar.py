"""Grammars: which tokens may follow, both while sampling and in training.

A grammar is a text in llguidance's variant of Lark and is recorded with the call
(`SamplingParams.grammar`). The tokens allowed after a completion prefix depend only on that
prefix, the grammar and the tokenizer, so training can replay a completion and get the masks that it
was sampled with.

    logits ──mask: -inf outside the grammar──▶ temperature ──▶ top_k ──▶ top_p ──▶ log-probs

Every tokenization of an allowed text is allowed, so the distribution is the model's own,
restricted to the grammar and renormalised (`no_forcing`; by default llguidance allows one
tokenization only).
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tuner.engines.grammar_text import GrammarError, compile_limits, with_head

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# A plain `.to("cuda")` from pageable memory waits until the GPU has finished all earlier work. From
# page-locked memory the transfer is queued and Python continues.


def to_device(values: np.ndarray[Any, Any] | Tensor, device: torch.device) -> Tensor:
    """Copy an array or tensor from main memory to `device` without waiting for the device."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


Bits = NDArray[np.uint8]

_COMPILED = 256
"""Number of compiled grammars to keep."""

_SECONDS = 30.0
"""How long a request waits for its grammar; the first may wait for others and for imports."""


class GrammarState:
    """Position of one completion in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, vocabulary: int) -> Bits:
        """The tokens that may follow, as bits, lowest first.

        End-of-sequence tokens are included if the grammar accepts the completion so far, and are
        the only ones if nothing else may follow.

        Args:
            vocabulary: Number of logits of the model; a token beyond them cannot follow.

        Returns:
            Shape [W], 8 W >= the smaller one of `vocabulary` and the tokenizer's size.

        Raises:
            GrammarError: The grammar is too complex to continue, or no token can follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_message(self._matcher)}")
        if 8 * len(bits) > vocabulary:
            bits = bits[: -(-vocabulary // 8)].copy()
            bits[-1] &= 0xFF >> (-vocabulary % 8)
        if not bits.any():
            raise GrammarError("no token of the vocabulary can continue this completion")
        return bits

    def advance(self, token_id: int) -> None:
        """Take the next token; raises GrammarError if it may not follow."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"token {token_id} may not follow: {_message(self._matcher)}")


class Grammars:
    """Compiles grammars for one tokenizer and caches them.

    Args:
        tokenizer: A fast transformers tokenizer, with byte-level or byte-fallback tokens.
        end_ids: Token ids that end a completion.
    """

    def __init__(self, tokenizer: Any, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = sorted(end_ids)
        self._compiling = threading.Lock()
        self._lock = threading.Lock()  # never held for long: the event loop takes it too
        self._vocabulary: Future[LLTokenizer] | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @staticmethod
    def supports(tokenizer: Any) -> bool:
        """Whether the bytes of the tokenizer's tokens are known."""
        return bool(getattr(tokenizer, "is_fast", False))

    def prepare(self) -> Future[LLTokenizer]:
        """Prepare the tokenizer's tables in a thread, once; grammars wait for them.

        They take about a second of CPU time for a vocabulary of 150,000. Other threads of Python
        wait meanwhile, so an engine does this when it starts. An error is raised by `start`.
        """
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Future()
                work = (self._vocabulary, self._tokenizer, self._end_ids)
                threading.Thread(target=_prepare, args=work, daemon=True).start()
            return self._vocabulary

    def start(self, grammar: str) -> GrammarState:
        """Initial state of a grammar. May be called in any thread.

        The first call for a grammar takes the time to compile it.

        Raises:
            GrammarError: The grammar cannot be compiled; has the compiler's message.
        """
        if (state := self._begun(grammar)) is not None:
            return state
        with self._compiling:
            if (state := self._begun(grammar)) is not None:
                return state
            matcher = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = matcher
                if len(self._compiled) > _COMPILED:
                    self._compiled.popitem(last=False)
                return GrammarState(matcher.deep_copy())

    def _begun(self, grammar: str) -> GrammarState | None:
        """Initial state if the grammar is already compiled."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                return None
            self._compiled.move_to_end(grammar)
            return GrammarState(matcher.deep_copy())

    async def started(self, grammar: str) -> GrammarState:
        """Like `start`, in a thread if it would take long.

        Raises:
            GrammarError: As `start`, or compiling takes too long.
        """
        if grammar in self._compiled:
            return self.start(grammar)
        try:
            async with asyncio.timeout(_SECONDS):
                return await asyncio.to_thread(self.start, grammar)
        except TimeoutError:
            raise GrammarError(
                f"the grammar cannot be compiled: it takes more than {_SECONDS:g} s"
            ) from None

    def replay(self, grammar: str, completion_ids: Sequence[int], vocabulary: int) -> Bits:
        """The tokens that could follow at each position of a completion.

        Args:
            grammar: The grammar it was sampled with.
            completion_ids: Sampled token ids, shape [T], T at least 1.
            vocabulary: Number of logits of the model.

        Returns:
            Bits, lowest first, shape [T, bytes]; `unpacked` makes booleans of them.

        Raises:
            GrammarError: The grammar cannot be compiled, or the ids do not follow it.
        """
        state = self.start(grammar)
        rows = []
        for position, token_id in enumerate(completion_ids):
            rows.append(state.mask(vocabulary))
            if not _is_set(rows[-1], token_id):
                raise GrammarError(
                    f"completion token {position} is {token_id}, which its grammar does not allow "
                    "there: was it sampled with another tokenizer?"
                )
            if position + 1 < len(completion_ids):
                state.advance(token_id)
        return np.stack(rows)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        vocabulary = self.prepare().result()
        text, limits = with_head(grammar), compile_limits()
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if not matcher.is_error():
            # Expensive cycles of references show here, and the work is done in this thread.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {_message(matcher)}")
        return matcher


def unpacked(masks: Bits, vocabulary: int, device: torch.device) -> Tensor:
    """Masks as booleans on `device`: [n, bytes] of bits, lowest first -> [n, vocabulary].

    If the model has more logits than the tokenizer has tokens, the rest are False.
    """
    packed = to_device(masks, device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    flags = ((packed[..., None] >> shifts) & 1).bool().flatten(1)[:, :vocabulary]
    missing = vocabulary - flags.shape[1]
    return torch.nn.functional.pad(flags, (0, missing)) if missing > 0 else flags


def _prepare(vocabulary: Future[LLTokenizer], tokenizer: Any, end_ids: list[int]) -> None:
    try:
        vocabulary.set_result(_vocabulary(tokenizer, end_ids))
    except BaseException as error:  # raised where the tables are needed
        vocabulary.set_exception(error)


def _vocabulary(tokenizer: Any, end_ids: list[int]) -> LLTokenizer:
    from llguidance.hf import from_tokenizer

    size = len(tokenizer)
    try:
        return from_tokenizer(tokenizer, eos_token=[id_ for id_ in end_ids if id_ < size])
    except Exception as error:
        raise GrammarError(
            f"the tokenizer ({type(tokenizer).__name__}) cannot be used with a grammar: {error}"
        ) from error


def _is_set(mask: Bits, token_id: int) -> bool:
    return 0 <= token_id < 8 * len(mask) and bool(mask[token_id // 8] >> (token_id % 8) & 1)


def _message(matcher: LLMatcher) -> str:
    """llguidance's message without the grammar and the parser's state that follow it."""
    return matcher.get_error().split("\n<state>")[0].split("\n<grammar>")[0].strip()[:500]
