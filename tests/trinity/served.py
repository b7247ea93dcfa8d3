"""A server that speaks vLLM's completions API with token ids, over the transformers engine."""

import asyncio
import json
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from tuner.engines import SamplingParams
from tuner.engines.grammar_text import with_head


class Stream:
    """Tokens as they are sampled, for the events of one answer."""

    def __init__(self):
        self.queue = asyncio.Queue()
        self.loop = asyncio.get_running_loop()

    def push(self, token_id, logprob, version):
        self.loop.call_soon_threadsafe(self.queue.put_nowait, (token_id, logprob))
        return True


class VLLMServer:
    """What Trinity-RFT's vLLM answers on `/v1/completions`, of the fields that are asked for.

    `spoil` changes an event before it is sent, `refuses` is why nothing is answered, and
    `cancelled` says that nobody waited for an answer.
    """

    def __init__(self, engine):
        self.engine = engine
        self.requests = []
        self.cancelled = asyncio.Event()
        self.spoil = lambda event: event
        self.refuses = ""
        self.loaded, self.unloaded = [], []
        self.adapters = 200, ""

    async def load(self, request):
        self.loaded.append(await request.json())
        status, message = self.adapters
        return JSONResponse({"error": {"message": message}} if message else {}, status)

    async def unload(self, request):
        self.unloaded.append(await request.json())
        return JSONResponse({}, 404)

    async def answer(self, request):
        body = await request.json()
        self.requests.append(body)
        room = self.engine.capabilities.max_model_len
        if len(body["prompt"]) + body["max_tokens"] > room:
            message = f"This model's maximum context length is {room} tokens."
            return JSONResponse({"error": {"message": message, "code": 400}}, 400)
        if self.refuses:
            return JSONResponse({"error": {"message": self.refuses, "code": 503}}, 503)
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body):
        sink = Stream()
        sampling = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=body["top_k"],
            stop=tuple(body.get("stop", ())),
            seed=body["seed"],
            top_logprobs=body["logprobs"],
            grammar=body.get("structured_outputs", {})
            .get("grammar", "")
            .removeprefix(with_head("")),
        )
        work = asyncio.ensure_future(
            self.engine.generate(body["prompt"], sampling, "session", sink)
        )
        sent, done = 0, False
        try:
            while not done:
                await asyncio.wait(
                    [work, waiting := asyncio.ensure_future(sink.queue.get())],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not waiting.done():
                    waiting.cancel()
                    done = True
                    continue
                token_id, logprob = waiting.result()
                yield self.event(body, [token_id], [logprob], None)
                sent += 1
            generation = await work
            ids, logprobs = generation.completion_ids[sent:], generation.logprobs[sent:]
            alternatives = generation.top_logprobs
            yield self.event(body, ids, logprobs, generation.finish_reason, alternatives)
            usage = {"prompt_tokens_details": {"cached_tokens": generation.cached_tokens}}
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            if not work.done():
                self.cancelled.set()
                work.cancel()

    def event(self, body, ids, logprobs, finish_reason, alternatives=()):
        choice = {
            "index": 0,
            "text": "",
            "token_ids": list(ids),
            "finish_reason": finish_reason,
            "logprobs": {
                "token_logprobs": list(logprobs),
                "top_logprobs": [
                    {f"token_id:{i}": value for i, value in pairs}
                    for pairs in alternatives[len(alternatives) - len(ids) :]
                ]
                or [{f"token_id:{i}": value} for i, value in zip(ids, logprobs, strict=True)],
            },
        }
        event = self.spoil({"object": "text_completion", "choices": [choice]})
        return b"data: " + json.dumps(event).encode() + b"\n\n"


@asynccontextmanager
async def serving(engine):
    """The server on a loopback port: (server, its address)."""
    server = VLLMServer(engine)
    handlers = {
        "completions": server.answer,
        "load_lora_adapter": server.load,
        "unload_lora_adapter": server.unload,
    }
    routes = [Route(f"/v1/{name}", one, methods=["POST"]) for name, one in handlers.items()]
    app = Starlette(routes=routes)
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
    web = uvicorn.Server(config)
    socket = config.bind_socket()
    port = socket.getsockname()[1]
    running = asyncio.ensure_future(web.serve(sockets=[socket]))
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        web.should_exit = True
        await running
