"""Requests to the gateway and what comes of them: the seam to the gateway, and the corpus.

`requests.json.gz` holds every request that the tests of the gateway made when it was written, and
some hundred of each fuzzer, with the decision: the request that was read, or status, type, code
and field of the error, and the number of its sentence. `sentences.json` holds the sentences, one a
line, with placeholders for what comes from the request:

    "temperature must be a number from 0 to 2, not a boolean"    message to the client
    "<field> must be a number from 0 to 2, not <value>"          sentence

Rewording a sentence changes one line of `sentences.json` and nothing of the corpus:

    python -m tests.golden.requests sentences              refuses if a decision changed, or if
                                                           requests now share a sentence that did
                                                           not before, or the reverse
    python -m tests.golden.requests sentences --regroup    allows the latter
    python -m tests.golden.requests write                  rewrites decisions, too, and prints them
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import gzip
import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.drift import merging
from tests.kit.toy import StubEngine, tokenizer
from tuner.engines.base import EngineCapabilities
from tuner.gateway import ChatRenderer, Gateway, Session
from tuner.gateway.app import EXCHANGES

# What knows the gateway from inside, for `read` and `keep` alone.
from tuner.gateway.dialects.anthropic import (
    MessagesExchange,
    read_count_request,
    read_messages_request,
)
from tuner.gateway.dialects.chat import read_chat_request
from tuner.gateway.dialects.responses import read_responses_request
from tuner.gateway.dialects.text import read_text_request
from tuner.gateway.request_error import RequestError
from tuner.gateway.service import StreamReply
from tuner.gateway.sessions import KeptResponse

CORPUS = Path(__file__).with_name("requests.json.gz")
SENTENCES = Path(__file__).with_name("sentences.json")
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
_ANSWER = (
    "<think>\nwhy\n</think>\n\nSure.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'
)
_TIMES = ("created", "created_at", "completed_at")

Json = dict[str, Any]


def read(path: str, body: bytes, gateway: Gateway, session: Session) -> Json:
    """What the reader of a dialect makes of a body.

    Returns:
        `{"request": ...}`, the fields of the CompletionRequest that differ from their defaults; or
        `{"status": ..., "error": ...}` as the client sees it, and the field in `param`.
    """
    service = session.service
    readers: dict[str, Callable[[], Any]] = {
        "/v1/chat/completions": lambda: read_chat_request(body, service),
        "/v1/completions": lambda: read_text_request(body, service),
        "/v1/responses": lambda: (
            read_responses_request(body, session.responses, service).completion
        ),
        "/v1/messages": lambda: read_messages_request(body, service),
        "/v1/messages/count_tokens": lambda: read_count_request(body, service),
    }
    try:
        request = readers[path]()
    except RequestError as error:
        answer = EXCHANGES.get(path, MessagesExchange).error(error)
        return _refused(error.status, answer, error.param)
    return {"request": _said(request)}


def keep(session: Session, kept: Mapping[str, Json]) -> None:
    """Give a session responses, by their ids, that it can go on from."""
    for response_id, response in kept.items():
        session.responses[response_id] = KeptResponse(response["messages"], response["items"])


def _said(request: Any) -> Json:
    said = {}
    for field in dataclasses.fields(request):
        if not field.compare:  # it says how, not what
            continue
        value = getattr(request, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value == default and type(value) is type(default):
            continue
        if field.name == "response_format":
            value = {"schema": value.schema}  # and where it stood in the request, for messages
        elif dataclasses.is_dataclass(value):
            value = dataclasses.asdict(value)  # type: ignore[arg-type]
        said[field.name] = value
    return said


async def answer(path: str, body: bytes, gateway: Gateway, session: Session) -> Json:
    """What the gateway as a whole makes of a body, in public names alone.

    Returns:
        As `read` does of an error; or digests of what the engine was asked for, of the calls in the
        trace and of the reply; with a reply that can be continued, of its continuation too.
    """
    named: list[str | None] = [None]
    with pytest.MonkeyPatch.context() as patch:
        error = MessagesExchange.error

        def noted(found: RequestError) -> bytes:
            named.append(found.param)
            return error(found)

        patch.setattr(MessagesExchange, "error", staticmethod(noted))
        status, reply = await _send(gateway, session, path, body)
    if status != 200:
        return _refused(status, reply, named[-1])
    replies = [reply]
    if path == "/v1/responses" and not reply.startswith("event"):
        more = {"model": "tiny", "input": "And?", "previous_response_id": json.loads(reply)["id"]}
        replies.append((await _send(gateway, session, path, json.dumps(more).encode()))[1])
    engine = gateway.engine
    assert isinstance(engine, StubEngine)
    asked = [(prompt, _said(sampling)) for prompt, sampling, _ in engine.requests]
    calls = [{**_said(call), "sampling": _said(call.sampling)} for call in session.calls]
    for call in calls:
        del call["started"], call["seconds"]
    return {
        "status": 200,
        "asked": _digest(asked),
        "calls": _digest(calls),
        "reply": _digest([_timeless(text) for text in replies]),
    }


def _refused(status: int, reply: str | bytes, field: str | None) -> Json:
    """An error; Anthropic's form has no place for the field, which is in its sentence alone."""
    return {"status": status, "error": {"param": field, **json.loads(reply)["error"]}}


async def _send(gateway: Gateway, session: Session, path: str, body: bytes) -> tuple[int, str]:
    headers = {"authorization": f"Bearer {session.key}"}
    reply = await gateway.handle("POST", path, headers, body)
    if isinstance(reply, StreamReply):
        return 200, b"".join([event async for event in reply.events]).decode()
    return reply.status, reply.body.decode()


def _timeless(text: str) -> list[Any]:
    """A reply without its times: its lines, and of those that hold JSON the values."""

    def strip(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: strip(value) for key, value in node.items() if key not in _TIMES}
        return [strip(item) for item in node] if isinstance(node, list) else node

    lines: list[Any] = []
    for line in text.splitlines() if text.startswith(("event: ", "data: ")) else [text]:
        payload = line.removeprefix("data: ")
        lines.append(strip(json.loads(payload)) if payload.startswith("{") else line)
    return lines


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Engine(StubEngine):
    """Answers with reasoning, words and a tool call, as capable as it is told to be."""

    def __init__(self, capabilities: EngineCapabilities) -> None:
        super().__init__([_ANSWER])
        self._capabilities = capabilities

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities


@cache
def _renderer(settings: str) -> ChatRenderer:
    options = json.loads(settings)
    spoken = merging() if options.pop("tokenizer") == "merging" else tokenizer()
    return ChatRenderer(spoken, **options)


async def outcome(case: Json, renderers: Sequence[Json]) -> Json:
    """What comes of one request of the corpus, in its reader and in the gateway."""
    data = _data(case)
    found: Json = {}
    for ask in ("read", "answer"):
        gateway = Gateway(
            _Engine(EngineCapabilities(**case["engine"])),
            _renderer(json.dumps(renderers[case["renderer"]])),
            model_name="tiny",
        )
        session = gateway.open_session("golden")
        keep(session, case["kept"])
        if ask == "read":
            found[ask] = read(case["path"], data, gateway, session)
        else:
            found[ask] = await answer(case["path"], data, gateway, session)
        await gateway.aclose()
    if found["answer"] == found["read"]:
        del found["answer"]  # refused by the reader already
    return json.loads(json.dumps(found))  # tuples become arrays, as in the file


def _data(case: Json) -> bytes:
    body = case["body"]
    return base64.b64decode(body["base64"]) if isinstance(body, dict) else body.encode()


_KINDS = {
    **{type(None): "null", bool: "a boolean", int: "a number", float: "a number"},
    **{str: "a string", list: "an array", dict: "an object"},
}
# Before the type that a value has; "a number" stands also where one is asked for.
_BEFORE_KIND = ("not", "is", "was", "got", "found")
_CODEC = r"'utf-8' codec can't .*"


def sentence(message: str, field: str | None, data: bytes) -> str:
    """A message with placeholders for what comes from the request.

    <field> is the field's name, <key> its last part, <value> its value as JSON or Python writes it,
    or the type of it, <problem> Python's reason why the body is not JSON.
    """
    body, problem = None, re.search(_CODEC, message)
    put = [("problem", re.escape(problem[0]))] if problem else []
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        put.append(("problem", re.escape(str(error))))
    if field is not None:
        put += [("field", re.escape(name)) for name in (json.dumps(field), field) if name]
        value = next((value for name, value in _fields(body) if name == field), None)
        text = json.dumps(value)
        text = text if len(text) <= 80 else text[:77] + "..."
        preceded = f"(?:{'|'.join(f'(?<={word} )' for word in _BEFORE_KIND)})"
        put.append(("value", preceded + _KINDS[type(value)]))
        put += [("value", re.escape(shown)) for shown in (text, repr(value))]
        put.append(("key", re.escape(repr(re.split(r"[.\]\[]", field)[-1]))))
    for name, pattern in put:
        if f"<{name}>" not in message:
            once = rf"(?<![\w<]){pattern}(?!\w)"
            message = re.sub(once, f"<{name}>", message, count=1, flags=re.DOTALL)
    return message


def _fields(body: Any) -> Iterator[tuple[str, Any]]:
    """Every field of a body by its name, as in `messages[0].content`."""
    left = [("", body)]
    while left:
        name, node = left.pop()
        for key, value in node.items() if isinstance(node, dict) else ():
            left.append((f"{name}.{key}" if name else key, value))
        for index, value in enumerate(node) if isinstance(node, list) else ():
            left.append((f"{name}[{index}]", value))
        if name:
            yield name, node


def names_its_field(text: str, field: str | None) -> bool:
    """Whether a sentence names the field and says something about it.

    Sentences about the conversation as a whole say "messages" in every dialect; in Responses
    requests that field is `input`.
    """
    rest = text.replace("<field>", "").strip(" .:")
    named = field is None or "<field>" in text or (field == "input" and "messages" in text)
    return named and len(rest.split()) > 2


def split(found: Json, case: Json) -> tuple[Json, dict[str, str]]:
    """Decisions of an outcome, and the sentence of each refusal ("read", "answer")."""
    decisions, texts = {}, {}
    for ask, one in found.items():
        decisions[ask] = one
        if "error" in one:
            error = dict(one["error"])
            texts[ask] = sentence(error.pop("message"), error["param"], _data(case))
            decisions[ask] = {**one, "error": error}
    return decisions, texts


def recorded(case: Json) -> tuple[Json, dict[str, int]]:
    """Like `split`, from the corpus: decisions, and the numbers of the sentences."""
    decisions, numbers = {}, {}
    for ask, one in case["outcome"].items():
        decisions[ask] = {key: value for key, value in one.items() if key != "sentence"}
        if "sentence" in one:
            numbers[ask] = one["sentence"]
    return decisions, numbers


def load() -> Json:
    """The corpus: `renderers`, and `cases` with their outcomes."""
    corpus: Json = json.loads(gzip.decompress(CORPUS.read_bytes()))
    return corpus


def sentences() -> dict[int, str]:
    """The sentences by number."""
    return {int(number): text for number, text in json.loads(SENTENCES.read_text()).items()}


def save(corpus: Json) -> None:
    """Write the corpus; equal corpora are equal files."""
    text = json.dumps(corpus, indent=0, ensure_ascii=True)
    CORPUS.write_bytes(gzip.compress(text.encode(), mtime=0))


def save_sentences(texts: Mapping[int, str]) -> None:
    """Write the sentences, one a line."""
    rows = {str(number): texts[number] for number in sorted(texts)}
    SENTENCES.write_text(json.dumps(rows, indent=0) + "\n")


async def differences(path: str) -> tuple[list[str], list[str]]:
    """The requests of one path whose decision differs from the recorded one, one text each; and
    those with the same decision and another sentence."""
    corpus, known = load(), sentences()
    decided, worded = [], []
    for case in corpus["cases"]:
        if case["path"] != path:
            continue
        now, texts_now = split(await outcome(case, corpus["renderers"]), case)
        before, numbers = recorded(case)
        texts_before = {ask: known[number] for ask, number in numbers.items()}
        title = f"{case['test']}\n  body   {str(case['body'])[:2000]}\n"
        if _text(now) != _text(before):
            decided.append(
                f"{title}  before {_text(before)[:3000]} {texts_before}\n"
                f"  now    {_text(now)[:3000]} {texts_now}"
            )
        elif texts_now != texts_before:
            worded.append(f"{title}  before {texts_before}\n  now    {texts_now}")
    return decided, worded


def _text(decisions: Json) -> str:
    return json.dumps(decisions, sort_keys=True)  # unlike ==, this tells 1 from 1.0 and True


Found = Sequence[tuple[Json, dict[str, str]]]
"""Decisions and sentences of each case, in order."""


async def _found(corpus: Json) -> Found:
    """Run every request; exits if a sentence is empty or does not name its field."""
    found = []
    for case in corpus["cases"]:
        decisions, texts = split(await outcome(case, corpus["renderers"]), case)
        for ask, text in texts.items():
            field = decisions[ask]["error"]["param"]
            if not names_its_field(text, field):
                sys.exit(f"nothing written: {text!r} is empty or does not name {field!r}")
        found.append((decisions, texts))
    return found


async def _write_sentences(*, regroup: bool) -> None:
    corpus, known = load(), sentences()
    found = await _found(corpus)
    texts_now: dict[int, set[str]] = defaultdict(set)
    for case, (decisions, texts) in zip(corpus["cases"], found, strict=True):
        before, numbers = recorded(case)
        if _text(decisions) != _text(before):
            sys.exit(f"nothing written: a decision changed\n{case}\n  now {decisions} {texts}")
        for ask, number in numbers.items():
            texts_now[number].add(texts[ask])
    changed = {n: texts for n, texts in texts_now.items() if texts != {known[n]}}
    unchanged = {known[n] for n in texts_now.keys() - changed.keys()}
    regrouped = [
        f"{known[n]!r}\n    is now {sorted(texts)}"
        for n, texts in changed.items()
        if len(texts) > 1 or texts & unchanged
    ]
    if regrouped and not regroup:
        sys.exit(
            "nothing written: requests with one sentence now have several, or that of other "
            "requests. If this is intended, add --regroup\n  " + "\n  ".join(regrouped)
        )
    _number(corpus, found, {n: min(texts) for n, texts in texts_now.items()})
    if regrouped:
        save(corpus)
    print(f"{len(changed)} sentences written, {len(regrouped)} of them regrouped")


def _number(corpus: Json, found: Found, known: Mapping[int, str]) -> None:
    """Put decisions and numbers of sentences into the corpus, and write the sentences.

    A request keeps the number of its sentence if `known` has that text under it.
    """
    texts = dict(known)
    numbers = {text: number for number, text in sorted(texts.items(), reverse=True)}
    used = set()
    for case, (decisions, said) in zip(corpus["cases"], found, strict=True):
        before = recorded(case)[1]
        for ask, text in said.items():
            number = before.get(ask)
            if number is None or texts.get(number) != text:
                number = numbers.setdefault(text, max(texts, default=0) + 1)
                texts[number] = text
            decisions[ask]["sentence"] = number
            used.add(number)
        case["outcome"] = decisions
    save_sentences({number: texts[number] for number in used})


async def _write() -> None:
    corpus = load()
    found, changed = await _found(corpus), 0
    for case, (now, texts) in zip(corpus["cases"], found, strict=True):
        before, _ = recorded(case)
        if _text(now) != _text(before):
            changed += 1
            print(f"{case['body']}\n  before {before}\n  now    {now} {texts}")
    _number(corpus, found, sentences())
    save(corpus)
    print(f"{len(corpus['cases'])} requests written, {changed} with another decision")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write"]:
            asyncio.run(_write())
        case ["sentences", *rest] if rest in ([], ["--regroup"]):
            asyncio.run(_write_sentences(regroup=bool(rest)))
        case _:
            sys.exit(__doc__)
