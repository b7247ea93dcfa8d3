"""DashScope elsewhere: a real HTTP server that speaks its own API, streamed as AgentScope asks."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class DashScopeServer(ThreadingHTTPServer):
    """Answers each generation with the text `answer(body)`; a word is a token.

    Attributes:
        requests: The bodies that came, in order.
        base_url: What DASHSCOPE_HTTP_BASE_URL is to be.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer: Callable[[dict[str, Any]], str]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.base_url = f"http://127.0.0.1:{self.server_address[1]}/api/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DashScopeServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/api/v1/services/aigc/text-generation/generation"
        assert body["parameters"]["incremental_output"]
        self.server.requests.append(body)
        pieces = self.server.answer(body).split(" ")
        events = b""
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            message = {"role": "assistant", "content": piece if number == 1 else f" {piece}"}
            choice = {"finish_reason": "stop" if last else "null", "message": message}
            usage = {"input_tokens": 10, "output_tokens": number, "total_tokens": 10 + number}
            data = {"request_id": "r", "output": {"choices": [choice]}, "usage": usage}
            events += f"id:{number}\nevent:result\n:HTTP_STATUS/200\ndata:".encode()
            events += json.dumps(data).encode() + b"\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(events)))
        self.end_headers()
        self.wfile.write(events)


@contextmanager
def dashscope_server(answer: Callable[[dict[str, Any]], str]):
    """A `DashScopeServer` that serves while the block runs."""
    server = DashScopeServer(answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
