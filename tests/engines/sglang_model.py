"""What the stand-in for an SGLang server computes: keys and values of prefixes, SGLang's sampler.

Independent of `tuner`'s engines: written after SGLang 0.5.23's `layers/sampler.py` and its radix
cache, for one row at a time.
"""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

_GREEDY_BELOW = 1e-6
_ALL = 1 << 30


class PrefixCache:
    """Keys and values of sequences, which go stale with new weights unless they are flushed."""

    def __init__(self) -> None:
        self._stored: list[tuple[list[int], Any]] = []

    def flush(self) -> None:
        self._stored.clear()

    def longest(self, ids: list[int]) -> Any:
        """A copy of what is known of a prefix of `ids`, shorter than these."""
        best, length = DynamicCache(), 0
        for stored, cache in self._stored:
            common = _common(stored, ids[:-1])
            if common > length:
                best, length = cache, common
        found = copy.deepcopy(best)
        if found.get_seq_length() > length:
            found.crop(length - found.get_seq_length())
        return found

    def store(self, ids: list[int], cache: Any) -> None:
        """Keep what was computed for `ids`, or for a beginning of them."""
        self._stored.append((ids[: cache.get_seq_length()], cache))


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


class Model:
    """A causal LM with prefixes, whose weights are replaced in place."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prefixes = PrefixCache()
        self.context = int(self.model.config.max_position_embeddings)
        self._llguidance: Any = None

    def load(self, folder: Path) -> None:
        new = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        self.model.load_state_dict(new.state_dict())

    @torch.no_grad()
    def logits(self, ids: list[int], cache: Any) -> Tensor:
        """Logits of the token after `ids`, [V]; `cache` grows by what was missing."""
        rest = torch.tensor([ids[cache.get_seq_length() :]])
        # The fourth is the cache, whose name depends on the version of transformers.
        return self.model(rest, None, None, cache, use_cache=True).logits[0, -1].float()

    def matcher(self, ebnf: str) -> Any:
        """As SGLang's grammar backend llguidance compiles a request's `ebnf`."""
        from llguidance import LLMatcher, grammar_from
        from llguidance.hf import from_tokenizer

        if self._llguidance is None:
            size, end = self.model.config.vocab_size, self.tokenizer.eos_token_id
            self._llguidance = from_tokenizer(self.tokenizer, size, eos_token=end)
        matcher = LLMatcher(self._llguidance, grammar_from("ebnf", ebnf), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


def allowed(matcher: Any, logits: Tensor) -> Tensor:
    """The logits, -inf where the grammar does not go on."""
    bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    mask = (bits[:, None] >> torch.arange(8)) & 1
    return logits.masked_fill(mask.flatten()[: logits.shape[-1]] == 0, -torch.inf)


class Draw:
    """One sampled token as SGLang reports it.

    Attributes:
        logprob: Of the distribution before it is cut to top_k and top_p; and, where `original` is
            true, as SGLANG_RETURN_ORIGINAL_LOGPROB makes it, before it is divided by temperature.
        top: The most probable (log-prob, id, None) of that distribution.
        support: The ids that were left.
        support_logprobs: Their log-probs after the cut.
    """

    def __init__(
        self, logits: Tensor, params: dict[str, Any], position: int, top: int, original: bool
    ) -> None:
        temperature = params.get("temperature", 1.0)
        top_k, top_p = params.get("top_k", -1), params.get("top_p", 1.0)
        if temperature < _GREEDY_BELOW:
            temperature, top_k = 1.0, 1
        probs = torch.softmax(logits / temperature, dim=-1)
        reported = torch.softmax(logits, dim=-1) if original else probs
        logprobs = reported.log().clamp(min=torch.finfo(torch.float32).min)
        ordered, order = probs.sort(descending=True)
        # Both cuts are of the whole distribution.
        before = ordered.cumsum(-1) - ordered
        kept = ordered.clone()
        kept[_ALL if top_k == -1 else top_k :] = 0
        kept[before > top_p] = 0
        place = _gumbel_argmax(kept.double().log(), params.get("sampling_seed") or 42, position)
        left = kept > 0
        self.token = int(order[place])
        self.logprob = float(logprobs[self.token])
        best = logprobs.topk(top)
        self.top = [
            (value, token, None)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        self.support = order[left].tolist()
        self.support_logprobs = (kept[left] / kept[left].sum()).log().tolist()


def _gumbel_argmax(logprobs: Tensor, seed: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    noise = torch.rand(logprobs.shape, generator=generator, dtype=torch.float64)
    return int((logprobs - (-noise.clamp(min=1e-300).log()).log()).argmax())
