"""Where a text can be cut so that its parts get the ids that the whole would get."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Letters, spaces, line ends and several bytes to a character on both sides of a token.
_PROBES = (("a", "b"), ("a ", " b"), ("\n", "\n\nb"), ("a\n\n", "\n b"), ("é", "é"), (".", "1 2"))


class SpecialTokens:
    """A tokenizer's special tokens as borders: text is split at them before anything else.

    That is so for every fast tokenizer, but it is tried for each token before it is relied on.

    Args:
        tokenizer: A transformers tokenizer.
        encode: Text to ids, without tokens that the text does not spell.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self._encode = encode
        self._texts = {
            id_: token.content
            for id_, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        self.ids = frozenset(self._texts)
        self._by_text = {text: id_ for id_, text in self._texts.items()}
        # The longest first: one token's text may begin another's.
        alternatives = sorted(map(re.escape, self._by_text), key=len, reverse=True)
        self._pattern = re.compile("|".join(alternatives) or r"(?!)")
        self._borders: dict[int, bool] = {}

    def text(self, token_id: int) -> str:
        """What the special token `token_id` looks like in text."""
        return self._texts[token_id]

    def at(self, text: str, position: int) -> int | None:
        """The special token that begins at `position` of `text`."""
        match = self._pattern.match(text, position)
        return self._by_text[match[0]] if match else None

    def last(self, text: str) -> int | None:
        """The special token that `text` ends with, but for white space."""
        ends = [match for match in self._pattern.finditer(text) if not text[match.end() :].strip()]
        return self._by_text[ends[0][0]] if ends else None

    def is_border(self, token_id: int) -> bool:
        """Whether what follows the token is encoded the same, whatever comes before it."""
        known = self._borders.get(token_id)
        if known is None:
            known = self._borders[token_id] = all(
                self._splits(token_id, before, after) for before, after in _PROBES
            )
        return known

    def borders(self, text: str) -> Iterator[tuple[int, int]]:
        """Where each special token of `text` that is a border begins and ends."""
        for match in self._pattern.finditer(text):
            if self.is_border(self._by_text[match[0]]):
                yield match.span()

    def _splits(self, token_id: int, before: str, after: str) -> bool:
        token = self._texts[token_id]
        alone = tuple(self._encode(token + after))
        whole = tuple(self._encode(before + token + after))
        left = tuple(self._encode(before + token))
        return alone[:1] == (token_id,) and left[-1:] == (token_id,) and whole == left + alone[1:]

    def encode_after(self, token_id: int, text: str) -> tuple[int, ...] | None:
        """Ids of `text` where it follows the token; None where they cannot be told."""
        if not self.is_border(token_id):
            return None
        ids = tuple(self._encode(self._texts[token_id] + text))
        return ids[1:] if ids[:1] == (token_id,) else None

    def encode_from(self, text: str) -> tuple[int, ...] | None:
        """Ids of `text`, which begins with a special token, wherever it stands."""
        token_id = self.at(text, 0)
        if token_id is None or not self.is_border(token_id):
            return None
        ids = tuple(self._encode(text))
        return ids if ids[:1] == (token_id,) else None
