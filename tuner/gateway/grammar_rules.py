"""What the families' grammars are made of: rules under names, tags, free text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

TokenId = Callable[[str], int | None]


class Rules:
    """Collects the rules of a grammar.

    Args:
        token_id: The id of a tag that is a token of its own; None for one that is spelled.
        opener: What opens reasoning, with which free text cannot begin; None for nothing.
    """

    def __init__(self, token_id: TokenId, opener: str | None) -> None:
        self._token_id = token_id
        self._opener = opener
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        """Define the rule `name`, or the terminal if it is upper case; returns the name."""
        self._rules[name] = body
        return name

    def fresh(self, prefix: str, body: str) -> str:
        """Define a rule under a name of its own, or find the equal one."""
        for name, known in self._rules.items():
            if known == body and name.startswith(prefix):
                return name
        return self.add(f"{prefix}{len(self._rules)}", body)

    def json(self, schema: str) -> str:
        """JSON by a schema from `json_schema`."""
        return self.fresh("json", f"%json {schema}")

    def tag(self, text: str) -> str:
        """The tag itself."""
        token_id = self._token_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def free(self, *tags: str, begins: str | None = None) -> str:
        """Text that is not reasoning, does not begin with `begins`, and spells no tag."""
        begins_with = [text for text in (self._opener, begins) if text is not None]
        parts = [_ANY_TEXT, *map(_not_first, begins_with), *map(_without, tags)]
        return self.fresh("FREE", " & ".join(parts))

    def free_until(self, tag: str, *others: str) -> str:
        """Text that is not reasoning and spells none of the tags; and then the first of them."""
        if self._token_id(tag) is not None:
            return f"{self.free(tag, *others)} {self.tag(tag)}"
        return self._lazy(self.free(*others), tag)

    def until(self, tag: str) -> str:
        """Any text up to the first such tag, and the tag."""
        if self._token_id(tag) is not None:
            return f"{self.fresh('TEXT', f'{_ANY_TEXT} & {_without(tag)}')} {self.tag(tag)}"
        return self._lazy(_ANY_TEXT, tag)

    def value_until(self, tag: str, other: str) -> str:
        """Any text in which `other` is not spelled, up to the first `tag`, and this tag."""
        return self._lazy(self.fresh("VALUE", f"{_ANY_TEXT} & {_without(other)}"), tag)

    def has(self, text: str) -> bool:
        """Whether the tag is a token of its own."""
        return self._token_id(text) is not None

    def _lazy(self, text: str, tag: str) -> str:
        name = f"until{len(self._rules)}"
        self._rules[f"{name}[lazy]"] = f"{text} {literal(tag)}"
        return name

    def text(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())


_ANY_TEXT = "/(?s:.*)/"


def _without(tag: str) -> str:
    """Regex: any text in which the tag is not spelled."""
    return f"~({_ANY_TEXT} {literal(tag)} {_ANY_TEXT})"


def _not_first(text: str) -> str:
    """Regex: any text that does not begin so, white space aside."""
    return f"~(/\\s*/ {literal(text)} {_ANY_TEXT})"


def literal(text: str) -> str:
    """A text as it stands in a grammar."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called.

    Attributes:
        name: Its name.
        schema: The schema of its arguments, as `json_schema` gives it.
        field: Where the request has the schema, for messages.
    """

    name: str
    schema: str
    field: str


@dataclass(frozen=True)
class Calls:
    """Expressions for calls, as rules know them.

    Attributes:
        calls: One call or several, and nothing before or behind.
        free: Text without a call.
        after_text: Text, and then calls.
    """

    calls: str
    free: str
    after_text: str
