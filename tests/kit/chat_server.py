"""A model elsewhere: a real HTTP server that speaks chat completions and answers as a test says."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Refusal(Exception):
    """Raised by an `answer`: the status, headers and body that the server answers with."""

    def __init__(self, status: int, message: str = "no", **headers: str) -> None:
        self.status, self.message = status, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class AnsweringServer(ThreadingHTTPServer):
    """A server whose `handler` answers each request with what `answer(body)` says.

    Attributes:
        requests: The bodies that came, in order.
        base_url: Where its API is.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, handler: type["Handler"], answer: Callable[[dict[str, Any]], Any], path: str
    ) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), handler)
        self.base_url = f"http://127.0.0.1:{self.server_address[1]}{path}"


class Handler(BaseHTTPRequestHandler):
    """Reads a request's JSON, and sends an answer whole."""

    protocol_version = "HTTP/1.1"
    server: AnsweringServer

    def log_message(self, *_: Any) -> None:
        pass

    def body(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(server: AnsweringServer):
    """The server, which serves while the block runs."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _ChatHandler(Handler):
    def do_POST(self) -> None:
        body = self.body()
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append(body | {"headers": headers})
        try:
            answer = self.server.answer(body)
        except Refusal as refusal:
            error = {"error": {"message": refusal.message}}
            return self.send(refusal.status, json.dumps(error).encode(), refusal.headers)
        message = {
            "role": "assistant",
            **({"content": answer} if isinstance(answer, str) else answer),
        }
        words = len(str(message["content"]).split())
        usage = {"prompt_tokens": 7, "completion_tokens": words, "total_tokens": 7 + words}
        common = {"id": f"c{len(self.server.requests)}", "created": int(time.time()), "model": "m"}
        if not body.get("stream"):
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            whole = {**common, "object": "chat.completion", "choices": choices, "usage": usage}
            return self.send(200, json.dumps(whole).encode(), {})
        deltas = [{"role": "assistant"}, *({"content": w} for w in _pieces(message["content"]))]
        deltas += [{"tool_calls": message["tool_calls"]}] if "tool_calls" in message else []
        deltas.append({})
        chunks = [
            {"choices": [{"index": 0, "delta": d, "finish_reason": None if d else "stop"}]}
            for d in deltas
        ]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": usage})
        lines = [{**common, "object": "chat.completion.chunk", **chunk} for chunk in chunks]
        events = b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines)
        self.send(200, events + b"data: [DONE]\n\n", {"content-type": "text/event-stream"})


def _pieces(text: str) -> list[str]:
    return [text[i : i + 4] for i in range(0, len(text), 4)]


def chat_server(answer: Callable[[dict[str, Any]], Any]):
    """Speaks chat completions while the block runs: `answer(body)` is a text or a whole message.

    Each of its `requests` has its headers too, under "headers".
    """
    return serving(AnsweringServer(_ChatHandler, answer, "/v1"))
