"""The parsers by name: vLLM's names, because Trinity-RFT's YAML holds those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.gateway.model.parsing.harmony import ANALYSIS, HARMONY, HarmonyScanner
from tuner.gateway.model.parsing.json_text import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
)
from tuner.gateway.model.parsing.message import (
    Delta,
    ParsedToolCall,
    PlainText,
    Scanner,
    Tools,
    read,
)
from tuner.gateway.model.parsing.qwen3_xml import QWEN3_XML
from tuner.gateway.model.parsing.thinking import TAG_FORMS


@dataclass(frozen=True)
class ReasoningParser:
    """Splits a completion's text into reasoning and the rest.

    Attributes:
        opener: How a prompt ends that has already opened the reasoning; None where none can.
        scanner: Whether the prompt has opened it -> a scanner for one text.
    """

    opener: str | None
    scanner: Callable[[bool], Scanner]

    def __call__(self, text: str, opened: bool) -> tuple[str | None, str]:
        """The reasoning, or None, and the rest of the whole `text`."""
        message = read(self.scanner(opened), text)
        return message.reasoning, message.content or ""


@dataclass(frozen=True)
class ToolCallParser:
    """Finds the tool calls in a completion's content.

    Attributes:
        scanner: The tools that the model was shown -> a scanner for one text.
        short_ids: Whether the family's templates want call ids of nine letters and digits.
    """

    scanner: Callable[[Tools], Scanner]
    short_ids: bool = False

    def __call__(self, text: str, tools: Tools) -> tuple[str, tuple[ParsedToolCall, ...], int]:
        """The rest of the whole `text`, its calls, and how many were malformed."""
        message = read(self.scanner(tools), text)
        return message.content or "", message.tool_calls, message.malformed_tool_calls


REASONING_PARSERS: dict[str, ReasoningParser] = {
    **{name: ReasoningParser(form.opener, form.scanner) for name, form in TAG_FORMS.items()},
    "openai_gptoss": ReasoningParser(ANALYSIS, HarmonyScanner),
    "none": ReasoningParser(None, lambda opened: PlainText()),
}
# Where several names mean one parser, the first is the one that messages suggest.
TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {
    "hermes": ToolCallParser(HERMES.scanner),
    "qwen3_coder": ToolCallParser(QWEN3_XML.scanner),
    "qwen3_xml": ToolCallParser(QWEN3_XML.scanner),
    "llama3_json": ToolCallParser(LLAMA3_JSON.scanner),
    "llama4_json": ToolCallParser(LLAMA3_JSON.scanner),
    "mistral": ToolCallParser(MISTRAL.scanner, short_ids=True),
    "deepseek_v3": ToolCallParser(DEEPSEEK_V3.scanner),
    "deepseek_v31": ToolCallParser(DEEPSEEK_V31.scanner),
    "openai": ToolCallParser(HARMONY.scanner),
    "none": ToolCallParser(lambda tools: PlainText()),
}


class MessageScanner:
    """Reads one completion's text: reasoning first, then tool calls in what is not reasoning.

    Args:
        reasoning: The family's reasoning parser.
        tool_calls: Its tool-call parser.
        tools: Tools the model was shown; without any, no calls are looked for.
        opened: Whether the prompt has already opened the reasoning.
    """

    def __init__(
        self, reasoning: ReasoningParser, tool_calls: ToolCallParser, *, tools: Tools, opened: bool
    ) -> None:
        self._reasoning = reasoning.scanner(opened)
        self._calls: Scanner = tool_calls.scanner(tools) if tools else PlainText()

    @property
    def malformed(self) -> int:
        return self._calls.malformed

    def feed(self, text: str) -> list[Delta]:
        """Take the text that comes next; what has become certain with it."""
        return self._pass_on(self._reasoning.feed(text))

    def close(self) -> list[Delta]:
        """What is left when the text has ended."""
        return self._pass_on(self._reasoning.close()) + self._calls.close()

    def _pass_on(self, deltas: list[Delta]) -> list[Delta]:
        passed: list[Delta] = []
        for delta in deltas:
            passed += [delta] if delta.content is None else self._calls.feed(delta.content)
        return passed
