"""How long a request's texts are, told before they are tokenised."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tuner.gateway.request_error import too_long

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONG = 16_384
"""Characters; to tokenise so many takes milliseconds, to do it in another thread a tenth of one."""

# Pre-tokenizers that lose no character, unless a split is told to remove what it finds.
_SPLITTING = {"ByteLevel", "Metaspace", "Digits", "Split"}


def is_long(*values: Any) -> bool:
    """Whether JSON values hold so much that their work belongs beside the event loop."""
    size, waiting = 0, list(values)
    for value in waiting:  # which grows by what is found in it
        size += len(value) if isinstance(value, str) else 1
        if size > LONG:
            return True
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
    return False


class LengthBound:
    """The fewest tokens that a text can have, by its bytes and the tokenizer's longest token.

    There is a bound where no character is ever lost: every byte is a token, a token that was added
    strips no white space, and what comes before the model shortens nothing. NFC shortens, but not
    the letters of ASCII: each of them begins a character of its own, whatever marks follow it.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)

    def check(self, text: str, limit: int | None) -> None:
        """Refuse a long text that leaves no room for an answer, if its length alone proves that.

        Args:
            text: Of a prompt, or a part of it.
            limit: The context's tokens; None refuses nothing.

        Raises:
            RequestError: 400: the text fills the context.
        """
        if limit is None or len(text) <= LONG:
            return
        fewest = self.fewest_tokens(text)
        if fewest >= limit:
            raise too_long(
                f"the prompt has at least {fewest} tokens, which leaves no room for an answer "
                f"within the context of {limit}"
            )

    def fewest_tokens(self, text: str) -> int:
        """How many tokens the text has at least; 0 where nothing is known."""
        longest, encoding = self._longest
        return -(-len(text.encode(encoding, "ignore")) // longest) if longest else 0

    @cached_property
    def _longest(self) -> tuple[int, str]:
        """Bytes of the longest token, 0 for no bound, and the encoding whose bytes count."""
        from tokenizers import models, pre_tokenizers

        backend = self._backend
        if backend is None or not isinstance(backend.model, models.BPE):
            return 0, ""
        model = backend.model
        vocabulary = backend.get_vocab(with_added_tokens=False)
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        normalizers, splits = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
        byte_level = any(part["type"] == "ByteLevel" for part in splits)
        if byte_level:
            whole, longest = alphabet <= vocabulary.keys(), max(map(len, vocabulary), default=0)
        else:
            whole = model.byte_fallback and {f"<0x{i:02X}>" for i in range(256)} <= {*vocabulary}
            longest = max((len(token.encode()) for token in vocabulary), default=0)
        composes = bool(normalizers) and all(part["type"] == "NFC" for part in normalizers)
        added = backend.get_added_tokens_decoder().values()
        if (
            not whole
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
            or any(token.lstrip or token.rstrip for token in added)
            or any(part["type"] not in _SPLITTING for part in splits)
            or any(part.get("behavior") == "Removed" for part in splits)
            or not (composes or all(map(_grows, normalizers)))
        ):
            return 0, ""
        for token in added:
            forms = [token.content]
            if backend.normalizer is not None:
                forms.append(backend.normalizer.normalize_str(token.content))
            longest = max(longest, *(len(form.encode()) for form in forms))
        return longest, "ascii" if composes else "utf-8"


def _parts(component: Any) -> list[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps."""
    if component is None:
        return []
    try:
        steps = [json.loads(component.__getstate__())]
    except Exception:
        # One that is written in Python has no state, and says so by an error of any kind.
        return [{"type": "unknown"}]
    for step in steps:  # which grows
        steps += step.get("normalizers", []) + step.get("pretokenizers", [])
    return [step for step in steps if step["type"] != "Sequence"]


def _grows(step: Any) -> bool:
    """Whether a normalizer's step takes nothing away."""
    if step["type"] == "Replace":
        old, new = str(step["pattern"].get("String", "")), str(step["content"])
        return 0 < len(old.encode()) <= len(new.encode())
    return bool(step["type"] == "Prepend")
