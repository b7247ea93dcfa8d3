"""What becomes of real chat templates: `python -m tests.gateway.template_matrix FOLDER [--write]`.

FOLDER has packages that ship templates, unpacked, each under its name and version:

    FOLDER/trl-1.16.0/trl/chat_templates/qwen3.jinja

Each template talks once: a question, two calls in one turn with reasoning, their results, an
answer, another question. The model writes what the template writes, in its own tokens. With
--write, docs/templates.md gets the table; without, it is printed.
"""

# The bars of DeepSeek's tags are full-width.
# ruff: noqa: RUF001

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.builders import logged
from tests.gateway.drift import Scripted, ask, merging, path
from tests.gateway.toy import ADD_TOOL
from tuner.errors import ConfigError
from tuner.gateway import ChatRenderer, Gateway
from tuner.gateway.conversations import LONGEST_OPENER, opener
from tuner.gateway.families.parsing import TOOL_CALL_PARSERS
from tuner.gateway.request_error import RequestError
from tuner.traces import Call, ReasoningPolicy

DOCUMENT = Path(__file__).parents[2] / "docs" / "templates.md"
BEGIN = "<!-- begin: python -m tests.gateway.template_matrix -->\n"
# Not for chats: documents to be embedded or ranked, and sources of kernels.
OTHER_USES = ("pooling", "third_party", "tests")

Speech = Callable[[], PreTrainedTokenizerFast]
USER = {"role": "user", "content": "2+40, 3+41?"}
SURE = {"role": "user", "content": "Sure?"}
THOUGHT, ANSWER = "Two sums.", "It is done."
NUMBERS = ((2, 40), (3, 41))
RESULTS = ("4211", "7333")
# What a template names as a token of its own. Tags of reasoning and calls may be or not be special.
_SPECIAL = re.compile(
    r"<\|[^|<>\s{}']+\|>|<｜[^｜<>\s{}']+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z][A-Z_]+\]|</?s>"
    r"|<(?:start|end)_of_turn>|<sep>|<seed:[be]os>|\[e~\[|\]~b\]|\]~!b\["
)
_BLOCKS = {
    "deepseek_r1": ("<think>\n", f"{THOUGHT}\n</think>\n\n"),
    "mistral": ("[THINK]", f"{THOUGHT}[/THINK]"),
    "openai_gptoss": (
        "<|channel|>analysis<|message|>",
        f"{THOUGHT}<|end|><|start|>assistant",
    ),
    "none": ("", ""),
}


@dataclass(frozen=True)
class Verdict:
    """What became of a template.

    Attributes:
        verdict: In a word: made, warned, no tools or refused.
        why: Of a verdict that is not "made"; else how it takes two calls, if not as they are.
        parsers: Of tool calls and reasoning.
        template, keep: Under each policy, the prompts after the results and after another question.
    """

    verdict: str
    why: str = ""
    parsers: str = ""
    template: str = ""
    keep: str = ""


def verdict(template: str, speech: Speech = merging) -> Verdict:
    """Make a renderer with the parsers that fit, and talk."""
    reasoning = _reasoning_parser(template)
    refusal = ""
    for parser in TOOL_CALL_PARSERS:
        if parser == "none":
            break
        try:
            renderer = ChatRenderer(
                _spoken(template, speech),
                chat_template=template,
                tool_call_parser=parser,
                reasoning_parser=reasoning,
            )
        except ConfigError as error:
            refusal = str(error)
            continue
        return _met(renderer, parser, reasoning)
    assert "nor any other" in refusal
    renderer = ChatRenderer(
        _spoken(template, speech),
        chat_template=template,
        tool_call_parser="none",
        reasoning_parser=reasoning,
    )
    why = "no parser reads the form of its calls"
    try:
        call = _written(renderer, "none", [USER], {**_calling(1), "reasoning_content": None}, "40")
    except RequestError as error:
        return Verdict("refused", f"{why}; {error}")
    begin = re.sub(r"\s+", " ", call)[:60].replace("`", "'").strip()
    return Verdict("refused", f"{why}: `{begin}` ...")


def _met(renderer: ChatRenderer, parser: str, reasoning: str) -> Verdict:
    said = "the model's chat template "
    if renderer.no_tools:
        found = renderer.no_tools.removeprefix(said).partition(": set model.chat_template_path")[0]
        return Verdict("no tools", found)
    logged = _first_warning(renderer)
    if logged:
        return Verdict("warned", logged.removeprefix(said).partition(": set model.")[0])
    why = ""
    calls = 2
    try:
        renderer.render_text([USER, _calling(2), *_results(2)], [ADD_TOOL])
    except RequestError as error:
        why = str(error).removeprefix(said).partition(": set model.")[0]
        calls = 1
    parsers = f"`{parser}`, `{reasoning}`"
    under: dict[str, str] = {}
    policies: tuple[ReasoningPolicy, ...] = ("template", "keep")
    for policy in policies[: 1 if reasoning == "none" else 2]:
        try:
            under[policy] = asyncio.run(_talk(renderer, reasoning, calls, policy))
        except _Unread as unread:
            return Verdict("made", str(unread), parsers)
    return Verdict("made", why, parsers, **under)


class _Unread(Exception):
    """The parser does not read all calls that the template writes."""


async def _talk(renderer: ChatRenderer, reasoning: str, count: int, policy: ReasoningPolicy) -> str:
    """How the second and the third prompt go on, as a cell."""
    script = [spelled(renderer, text) for text in _sampled(renderer, reasoning, count)]
    gateway = Gateway(Scripted(*script), renderer, model_name="tiny", reasoning=policy)
    session = gateway.open_session("r")
    messages: list[Any] = [USER]
    calling = await ask(session, messages, tools=[ADD_TOOL])
    calls = calling.get("tool_calls", [])
    given = [json.loads(call["function"]["arguments"]) for call in calls]
    if given != [{"a": a, "b": b} for a, b in NUMBERS[:count]]:
        raise _Unread(f"of {count} calls in one turn the parser reads {len(given)}")
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": result}
        for call, result in zip(calls, RESULTS, strict=False)
    ]
    messages = [*messages, calling, *results]
    answer = await ask(session, messages, tools=[ADD_TOOL])
    await ask(session, [*messages, answer, SURE], tools=[ADD_TOOL])
    await gateway.aclose()
    made = session.calls
    return ", ".join(_going_on(renderer, made[: count + 1]) for count in (1, 2))


def _going_on(renderer: ChatRenderer, calls: tuple[Call, ...]) -> str:
    """How the last prompt goes on from the calls before it."""
    *earlier, later = calls
    if later.rerendered is None:
        whole = path(earlier[-1])
        # The model's end token may not be the template's.
        assert later.reused_ids in (len(whole), len(whole) - 1)
        assert later.prompt_ids[: later.reused_ids] == whole[: later.reused_ids]
        return "exact"
    text = renderer.render_text(later.messages, later.tools)
    assert later.reused_ids or later.prompt_ids == renderer.encode(text)
    written = renderer.decode(path(earlier[-1]))
    first = renderer.decode(earlier[0].prompt_ids)
    tags = opener(renderer, first[-LONGEST_OPENER:])
    if text.count(THOUGHT) < sum(
        THOUGHT in renderer.decode(call.completion_ids) for call in earlier
    ):
        cause = "reasoning left out"
    elif (same := _common(text, written)) < len(first) - len(tags):
        cause = "the text before the turn changes"
    elif same < len(first):
        cause = "what the prompt says of the reasoning left out"
    else:
        cause = "the turn is written otherwise"
    return f"afresh ({later.rerendered}: {cause})"


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _sampled(renderer: ChatRenderer, reasoning: str, count: int) -> tuple[str, str]:
    """What a model that writes as its template does says to the question and to the results."""
    calling = _calling(count)
    said = _written(renderer, reasoning, [USER], calling, str(NUMBERS[count - 1][1]))
    if reasoning == "openai_gptoss":
        final = f"<|channel|>final<|message|>{ANSWER}<|return|>"
        return said, "".join(_BLOCKS[reasoning]) + final
    answer = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    before = [USER, calling, *_results(count)]
    return said, _written(renderer, reasoning, before, answer, ANSWER)


def _written(
    renderer: ChatRenderer, reasoning: str, before: list[Any], turn: Any, last: str
) -> str:
    """The turn's text up to its end; `last` is what it says last."""
    prompt = renderer.render_text(before, [ADD_TOOL])
    closed = prompt.rstrip().endswith("</think>")  # the model is told not to reason
    if closed:
        turn = {**turn, "reasoning_content": None}
    whole = renderer.render_text([*before, turn], [ADD_TOOL], add_generation_prompt=False)
    begin = _common(prompt, whole)
    if begin < len(prompt):
        begin = max(prompt.rfind(end, 0, begin) for end in "\n>]") + 1
    text = whole[begin:]
    said = text.rfind(last) + len(last)
    special = renderer.special_tokens
    stops = [text.find(special.text(end), said) for end in renderer.turn_ends]
    stop = min((stop for stop in stops if stop >= 0), default=len(text.rstrip()))
    end = special.at(text, stop)
    end_text = str(renderer.tokenizer.eos_token) if end is None else special.text(end)
    text = text[:stop]
    if last == ANSWER and any(special.text(e) in text for e in renderer.turn_ends):
        text = text[text.index(last) :]  # an earlier turn's end is in it: the prompt was no prefix
    if THOUGHT not in text:
        text = re.sub(r"^\s*(<think>\s*)?(</think>\s*)?", "", text)
        opener, rest = _BLOCKS[reasoning]
        if renderer.opened_reasoning(renderer.encode(prompt)):
            text = rest + text
        elif not closed:
            text = opener + rest + text
    return text + end_text


def _calling(count: int) -> dict[str, Any]:
    calls = [
        {
            "id": f"abc123de{index}",
            "type": "function",
            "function": {"name": "add", "arguments": json.dumps({"a": a, "b": b})},
        }
        for index, (a, b) in enumerate(NUMBERS[:count])
    ]
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": calls,
        "reasoning_content": THOUGHT,
    }


def _results(count: int) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": f"abc123de{index}", "content": result}
        for index, result in enumerate(RESULTS[:count])
    ]


def _reasoning_parser(template: str) -> str:
    if "[THINK]" in template:
        return "mistral"
    if "<|channel|>" in template:
        return "openai_gptoss"
    return "deepseek_r1" if "think>" in template else "none"


def _spoken(template: str, speech: Speech) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer that has the template's tokens as special ones."""
    spoken = deepcopy(speech())
    named = sorted(set(_SPECIAL.findall(template)) - {"<|im_start|>", "<|im_end|>"})
    eos = "<|im_end|>" if "<|im_end|>" in template else "</s>"
    spoken.add_special_tokens(
        {"bos_token": "<s>", "eos_token": eos, "additional_special_tokens": named}
    )
    return spoken


def spelled(renderer: ChatRenderer, text: str) -> tuple[int, ...]:
    """The text letter by letter, but for special tokens: ids that the tokenizer never gives."""
    spoken = renderer.tokenizer
    tokens = {token.content: id_ for id_, token in spoken.added_tokens_decoder.items()}
    vocabulary = spoken.get_vocab()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    longest_first = sorted(map(re.escape, tokens), key=len, reverse=True)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(longest_first)})", text):
        if part in tokens:
            ids.append(tokens[part])
        elif part:
            ids += [vocabulary[c] for piece, _ in letters.pre_tokenize_str(part) for c in piece]
    return tuple(ids)


def _first_warning(renderer: ChatRenderer) -> str:
    """What the first tools that the renderer is shown make it say."""
    with logged() as said:
        renderer.render_text([USER], [ADD_TOOL])
    return "".join(said)


def digest(template: str) -> str:
    return hashlib.sha256(template.encode()).hexdigest()[:16]


def cells(template: str, speech: Speech = merging) -> str:
    """The template's row in the table, but for its name."""
    found = verdict(template, speech)
    parts = (digest(template), found.verdict, found.parsers, found.template, found.keep, found.why)
    return " | ".join(part.replace("|", "\\|").replace("\n", " ") for part in parts)


def table(folder: Path) -> Iterable[str]:
    """The lines of the table of all templates in the folder, and of their counts."""
    names: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*/**/*.jinja")):
        package, *inside = file.relative_to(folder).parts
        if not set(inside) & set(OTHER_USES):
            name, _, version = package.rpartition("-")
            names.setdefault(file.read_text(encoding="utf-8"), []).append(
                f"{name} {version}: `{file.name}`"
            )
    rows = {template: cells(template) for template in names}
    counts = Counter(row.split(" | ")[1] for row in rows.values())
    yield f"Of {len(rows)} templates: " + ", ".join(
        f"{count} {name}" for name, count in counts.most_common()
    )
    yield ""
    yield "| template | sha256 | verdict | parsers | `template` | `keep` | why |"
    yield "|---|---|---|---|---|---|---|"
    for template, row in rows.items():
        yield f"| {', '.join(names[template])} | {row} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    text = "\n".join(table(given.folder)) + "\n"
    if given.write:
        head = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[0]
        DOCUMENT.write_text(head + BEGIN + text, encoding="utf-8")
    else:
        print(text, end="")
