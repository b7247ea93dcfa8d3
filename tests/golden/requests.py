"""Requests to the gateway and what comes of them: the seam to the gateway, and the corpus.

`requests.json.gz` holds every request that the tests of the gateway made when it was written, and
some hundred of each fuzzer. The outcomes in it are those of the code that wrote it, so a sentence
or a reader that is changed on purpose is written again and the change looked at:

    python -m tests.golden.requests write
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import gzip
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.gateway.drift import merging
from tests.gateway.toy import StubEngine, tokenizer
from tuner.engines.base import EngineCapabilities
from tuner.gateway import ChatRenderer, Gateway, Session

# What knows the gateway from inside, for `read` and `keep` alone.
from tuner.gateway.dialects.anthropic import MessagesExchange
from tuner.gateway.dialects.anthropic_request import read_count_request, read_messages_request
from tuner.gateway.dialects.chat import read_chat_request
from tuner.gateway.dialects.responses_request import read_responses_request
from tuner.gateway.dialects.text import read_text_request
from tuner.gateway.request_error import RequestError
from tuner.gateway.routes import EXCHANGES
from tuner.gateway.service import StreamReply
from tuner.gateway.sessions import KeptResponse

CORPUS = Path(__file__).with_name("requests.json.gz")
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
        `{"status": ..., "error": ...}` as the client sees it.
    """
    service = session.service
    capabilities = service.engine.capabilities
    readers: dict[str, Callable[[], Any]] = {
        "/v1/chat/completions": lambda: read_chat_request(body, capabilities),
        "/v1/completions": lambda: read_text_request(body, service),
        "/v1/responses": lambda: (
            read_responses_request(body, session.responses, capabilities).completion
        ),
        "/v1/messages": lambda: read_messages_request(body, service),
        "/v1/messages/count_tokens": lambda: read_count_request(body, service),
    }
    try:
        request = readers[path]()
    except RequestError as error:
        answer = EXCHANGES.get(path, MessagesExchange).error(error)
        return {"status": error.status, "error": json.loads(answer)["error"]}
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
        `{"status": ..., "error": ...}`, or digests of what the engine was asked for, of the calls
        in the trace and of the reply; with a reply that can be continued, of its continuation too.
    """
    status, reply = await _send(gateway, session, path, body)
    if status != 200:
        return {"status": status, "error": json.loads(reply)["error"]}
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
    body = case["body"]
    data = base64.b64decode(body["base64"]) if isinstance(body, dict) else body.encode()
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


def load() -> Json:
    """The corpus: `renderers`, and `cases` with their outcomes."""
    corpus: Json = json.loads(gzip.decompress(CORPUS.read_bytes()))
    return corpus


def save(corpus: Json) -> None:
    """Write the corpus; equal corpora are equal files."""
    text = json.dumps(corpus, indent=0, ensure_ascii=True)
    CORPUS.write_bytes(gzip.compress(text.encode(), mtime=0))


async def differences(path: str) -> list[str]:
    """The requests of one path of which something else has become, one text each."""
    corpus = load()
    different = []
    for case in corpus["cases"]:
        if case["path"] != path:
            continue
        found = await outcome(case, corpus["renderers"])
        if json.dumps(found, sort_keys=True) != json.dumps(case["outcome"], sort_keys=True):
            different.append(
                f"{case['test']}\n  body   {str(case['body'])[:2000]}\n"
                f"  before {json.dumps(case['outcome'])[:3000]}\n"
                f"  now    {json.dumps(found)[:3000]}"
            )
    return different


async def _write() -> None:
    corpus = load()
    changed = 0
    for case in corpus["cases"]:
        found = await outcome(case, corpus["renderers"])
        changed += found != case["outcome"]
        case["outcome"] = found
    save(corpus)
    print(f"{len(corpus['cases'])} requests written, {changed} with another outcome")


if __name__ == "__main__":
    if sys.argv[1:] != ["write"]:
        sys.exit(__doc__)
    asyncio.run(_write())
