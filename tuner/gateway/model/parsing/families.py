"""The parsers by name: vLLM's names, because Trinity-RFT's YAML holds those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.gateway.model.parsing.blocks import BlockForm
from tuner.gateway.model.parsing.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from tuner.gateway.model.parsing.harmony import ANALYSIS, HARMONY, HarmonyScanner
from tuner.gateway.model.parsing.hermes import HERMES
from tuner.gateway.model.parsing.llama3_json import LLAMA3_JSON
from tuner.gateway.model.parsing.message import Delta, ParsedToolCall, joined
from tuner.gateway.model.parsing.mistral import MISTRAL
from tuner.gateway.model.parsing.qwen3_xml import QWEN3_XML
from tuner.gateway.model.parsing.scanning import PlainText, Scanner, Tools
from tuner.gateway.model.parsing.thinking import MISTRAL_THINK, THINK, TagForm


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
        message = joined(*_read(self.scanner(opened), text))
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
        message = joined(*_read(self.scanner(tools), text))
        return message.content or "", message.tool_calls, message.malformed_tool_calls


def _read(scanner: Scanner, text: str) -> tuple[list[Delta], int]:
    deltas = [*scanner.feed(text), *scanner.close()]
    return deltas, scanner.malformed


def _tagged(form: TagForm) -> ReasoningParser:
    return ReasoningParser(form.opener, form.scanner)


def _blocks(form: BlockForm, *, short_ids: bool = False) -> ToolCallParser:
    return ToolCallParser(form.scanner, short_ids)


_THINK = _tagged(THINK)
_LLAMA3_JSON = _blocks(LLAMA3_JSON)
_QWEN3_XML = _blocks(QWEN3_XML)

REASONING_PARSERS: dict[str, ReasoningParser] = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "mistral": _tagged(MISTRAL_THINK),
    "openai_gptoss": ReasoningParser(ANALYSIS, HarmonyScanner),
    "none": ReasoningParser(None, lambda opened: PlainText()),
}
# Where several names mean one parser, the first is the one that messages suggest.
TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {
    "hermes": _blocks(HERMES),
    "qwen3_coder": _QWEN3_XML,
    "qwen3_xml": _QWEN3_XML,
    "llama3_json": _LLAMA3_JSON,
    "llama4_json": _LLAMA3_JSON,
    "mistral": _blocks(MISTRAL, short_ids=True),
    "deepseek_v3": _blocks(DEEPSEEK_V3),
    "deepseek_v31": _blocks(DEEPSEEK_V31),
    "openai": _blocks(HARMONY),
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
