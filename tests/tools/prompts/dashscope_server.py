"""DashScope elsewhere: a real HTTP server that speaks its own API, streamed as AgentScope asks."""

import json
from collections.abc import Callable
from typing import Any

from tests.kit.chat_server import AnsweringServer, Handler, serving


class _Generation(Handler):
    def do_POST(self) -> None:
        body = self.body()
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
        self.send(200, events, {"content-type": "text/event-stream"})


def dashscope_server(answer: Callable[[dict[str, Any]], str]):
    """Answers each generation with the text `answer(body)`, a word is a token; its `base_url` is
    what DASHSCOPE_HTTP_BASE_URL is to be."""
    return serving(AnsweringServer(_Generation, answer, "/api/v1"))
