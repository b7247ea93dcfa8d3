r"""Reasoning between two tags at the beginning of the text.

    <think>\nreasoning\n</think>\n\ncontent

Text that ends inside the tags is all reasoning. The prompt may have opened it; then the text begins
inside, and may still repeat the opening tag. A tag anywhere else is content.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.gateway.model.parsing.message import Delta, begun


@dataclass(frozen=True)
class TagForm:
    """The tags of a family.

    Attributes:
        line_ends: Whether newlines around the tags belong to the form.
    """

    opener: str
    closer: str
    line_ends: bool

    def scanner(self, opened: bool) -> TagScanner:
        return TagScanner(self, opened)


class TagScanner:
    """Splits one text into reasoning and content."""

    malformed = 0

    def __init__(self, form: TagForm, opened: bool) -> None:
        self._form = form
        self._opened = opened
        self._state = "start"
        self._text = ""
        self._trimming = False  # newlines at this place belong to the form

    def feed(self, text: str) -> list[Delta]:
        self._text += text
        return self._scan(final=False)

    def close(self) -> list[Delta]:
        return self._scan(final=True)

    def _scan(self, *, final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if self._state == "start" and self._begin(final=final) and self._state == "reasoning":
            deltas.append(Delta(reasoning=""))
        if self._state == "reasoning":
            self._reason(deltas, final=final)
        if self._state == "content":
            self._trim()
            if self._text:
                deltas.append(Delta(content=self._text))
            self._text = ""
        return deltas

    def _begin(self, *, final: bool) -> bool:
        body = self._text.lstrip()
        if body.startswith(self._form.opener):
            self._state = "reasoning"
            self._text = body.removeprefix(self._form.opener)
        elif self._form.opener.startswith(body) and not final:
            return False
        else:
            self._state = "reasoning" if self._opened else "content"
        self._trimming = self._form.line_ends and self._state == "reasoning"
        return True

    def _reason(self, deltas: list[Delta], *, final: bool) -> None:
        self._trim()
        text, closed, rest = self._text.partition(self._form.closer)
        kept = len(text) if closed or final else begun(text, (self._form.closer,))
        if self._form.line_ends:
            kept = len(text[:kept].rstrip("\n"))
        if kept:
            deltas.append(Delta(reasoning=text[:kept]))
        if closed:
            self._state = "content"
            self._text = rest
            self._trimming = self._form.line_ends
        else:
            self._text = "" if final else text[kept:]

    def _trim(self) -> None:
        if self._trimming:
            self._text = self._text.lstrip("\n")
            self._trimming = not self._text


_THINK = TagForm("<think>", "</think>", line_ends=True)
TAG_FORMS = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "mistral": TagForm("[THINK]", "[/THINK]", line_ends=False),
}
"""By the names of the reasoning parsers."""
