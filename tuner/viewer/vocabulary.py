"""Text of token ids, from the tokenizer of a run. Needs neither PyTorch nor transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"
# What decoding gives for bytes that are only a part of a character.
PARTIAL = "\ufffd"
# Shown for the tokens of a character before its last; UTF-8 has at most four bytes.
BEGINS_CHARACTER = "\u22ef"
LONGEST_CHARACTER = 4


class Vocabulary:
    """Token ids as text.

    Attributes:
        problem: Why there is no text, or None.
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        """The first `tokenizer.json` in `folders`: paths, or names of models in the local cache."""
        self._tokenizer: Any = None
        self._known: dict[int, str] = {}
        self.problem: str | None = None
        for folder in folders:
            path = _file_of(folder)
            if path is not None:
                self._open(path)
                return
        looked = " or ".join(str(folder) for folder in folders) or "the run directory"
        self.problem = f"there is no {FILE} in {looked}, so tokens are shown as ids"

    def _open(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
            # A word to stand before each token: alone, some decoders drop its leading space.
            self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[:1]
            self._anchor_text = self._decode(self._anchor)
        except Exception as error:  # the library raises bare Exception
            self._tokenizer = None
            self.problem = f"{path} cannot be read ({error}), so tokens are shown as ids"

    def texts(self, ids: set[int]) -> dict[int, str]:
        """Text of each of `ids`, seen alone; empty without a tokenizer."""
        if self._tokenizer is None:
            return {}
        for id in ids - self._known.keys():
            text = self._decode([*self._anchor, id])
            self._known[id] = text.removeprefix(self._anchor_text)
        return {id: self._known[id] for id in sorted(ids)}

    def characters(self, ids: Sequence[int]) -> dict[int, str]:
        """By position: text of tokens that only together make a character.

        The last of them has the character, those before it a mark.
        """
        texts = self.texts(set(ids))
        found: dict[int, str] = {}
        position = 0
        while texts and position < len(ids):
            length = 1
            if PARTIAL in texts[ids[position]]:
                length, text = self._character(ids[position : position + LONGEST_CHARACTER])
                if length > 1:
                    found |= dict.fromkeys(range(position, position + length - 1), BEGINS_CHARACTER)
                    found[position + length - 1] = text
            position += length
        return found

    def _character(self, ids: Sequence[int]) -> tuple[int, str]:
        for length in range(2, len(ids) + 1):
            text = self._decode(ids[:length])
            if PARTIAL not in text:
                return length, text
        return 1, ""

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def _file_of(folder: str | Path) -> Path | None:
    path = Path(folder).expanduser() / FILE
    if path.is_file():
        return path
    if isinstance(folder, str) and folder.count("/") == 1 and not folder.startswith((".", "/")):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(folder, FILE)
        return Path(cached) if isinstance(cached, str) else None
    return None
