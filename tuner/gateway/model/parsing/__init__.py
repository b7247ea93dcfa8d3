"""Reasoning and tool calls read out of a completion's text, by the name of the family's form.

Nothing is invented and nothing lost: what is not a well-formed call stays in the content, and is
counted. No library was found that holds to this. Transformers' response templates
(`tokenizer.parse_response`) return decoded arguments, whose text is then no longer what the model
wrote, raise on a malformed call and drop a truncated one. `renderers` (PyPI) decodes arguments,
strips the content and leaves out the text after a call, and reads whole completions only. vLLM's
parsers come with vLLM alone, and do not count what they cannot read.
"""

from tuner.gateway.model.parsing.families import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    MessageScanner,
)
from tuner.gateway.model.parsing.message import Delta, ParsedMessage, ParsedToolCall, Tools, joined

__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "Delta",
    "MessageScanner",
    "ParsedMessage",
    "ParsedToolCall",
    "Tools",
    "joined",
]
