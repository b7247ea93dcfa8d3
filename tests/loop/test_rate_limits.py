"""Rollouts behind rate limits wait as they are told, and nothing is recorded or trained twice.

Two APIs on a loopback port. `judge` is somebody else's model, which the judge asks. `door` stands
between the agent and the gateway: it answers 429 before a request is let through, and 429 in place
of the answer to one that was.
"""

import collections
import json
import socket
import threading
import time

import httpx
import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.kit import runs
from tuner import JudgeOutput, WorkflowOutput
from tuner.loop import run_local
from tuner.traces import TraceStore

WAIT = 0.02
"""Seconds that both ask for."""
STEPS, TASKS, REPEAT = 2, 2, 3
ROLLOUTS = STEPS * TASKS * REPEAT
MAX_CALLS = 3


class Apis:
    """The two servers, in a thread with an event loop of its own.

    Attributes:
        url: Where they are.
        judged: For each request to `judge`: its text, when it came, and the status it was given.
        through: Requests that `door` let through, by key and idempotency key.
        refused: How many it answered with 429.
    """

    def __init__(self):
        self.judged, self.through, self.refused = [], collections.Counter(), 0
        app = Starlette(
            routes=[
                Route("/judge/v1/chat/completions", self.judge, methods=["POST"]),
                Route("/door/v1/chat/completions", self.door, methods=["POST"]),
            ]
        )
        self._seen = collections.Counter()
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        # What comes before the server listens to it waits in the socket's queue.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()

    def close(self):
        self._server.should_exit = True
        self._thread.join()

    async def judge(self, request):
        came = time.monotonic()
        text = (await request.json())["messages"][0]["content"]
        status = 429 if len(self.judged) % 3 == 0 else 200
        self.judged.append((text, came, status))
        if status == 429:
            return JSONResponse({}, 429, headers={"retry-after": str(WAIT)})
        return JSONResponse(answer_of(text))

    async def door(self, request):
        body, headers = await request.body(), dict(request.headers)
        name = headers["authorization"], headers["idempotency-key"]
        self._seen[name] += 1
        if self._seen[name] == 1:
            return self._refuse()
        self.through[name] += 1
        passed = {k: headers[k] for k in ("authorization", "content-type", "idempotency-key")}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            url = f"{headers['x-gateway']}/chat/completions"
            reply = await client.post(url, content=body, headers=passed)
        if self._seen[name] == 2 and reply.status_code == 200:
            return self._refuse()  # the agent never sees this answer, which is committed
        return Response(reply.content, reply.status_code, media_type="application/json")

    def _refuse(self):
        self.refused += 1
        return JSONResponse({}, 429, headers={"retry-after-ms": "1"})


def answer_of(text):
    """A chat completion whose text is the reward of `text`."""
    content = str(sum(map(ord, text)) % 17 / 17)
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    start = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    return {**start, "choices": [choice], "usage": usage}


@pytest.fixture
def apis():
    made = Apis()
    yield made
    made.close()


@pytest.mark.long
def test_limits_are_respected_and_what_is_sent_again_is_recorded_once(
    apis, random_model_path, tmp_path
):
    async def workflow(task, model):
        headers = {"x-gateway": model.base_url}
        async with openai.AsyncOpenAI(
            base_url=f"{apis.url}/door/v1", api_key=model.api_key, default_headers=headers
        ) as client:

            async def ask(number):
                completion = await client.chat.completions.create(
                    model=model.model_name,
                    messages=[{"role": "user", "content": task["question"]}],
                    extra_headers={"Idempotency-Key": str(number)},
                )
                return completion.choices[0].message.content

            texts = [await ask(number) for number in range(MAX_CALLS)]
            with pytest.raises(openai.PermissionDeniedError, match=r"tuner\.max_calls"):
                await ask(MAX_CALLS)
        return WorkflowOutput(response="".join(texts))

    async def judge(task, response, auxiliary_models):
        completion = await auxiliary_models["judge"].client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": response}]
        )
        return JudgeOutput(reward=float(completion.choices[0].message.content))

    config = runs.config(
        random_model_path,
        tmp_path,
        "tuner.deterministic=false",
        f"tuner.max_calls={MAX_CALLS}",
        f"tuner.auxiliary_models.judge.base_url={apis.url}/judge/v1",
        "tuner.auxiliary_models.judge.model_name=m",
        "tuner.auxiliary_models.judge.max_concurrent=1",
        f"buffer.total_steps={STEPS}",
        "buffer.explorer_input.eval_tasksets=[]",
        "explorer.max_retry_times=0",
    )
    result = run_local(
        config, workflow=workflow, judge=judge, train_tasks=runs.TRAIN, eval_tasks={}
    )
    assert result.outcomes == {"completed": ROLLOUTS}

    # Each answer was let through twice, the second time as a replay; the last call is over the
    # limit, which is said once.
    assert collections.Counter(apis.through.values()) == {2: ROLLOUTS * MAX_CALLS, 1: ROLLOUTS}
    assert apis.refused == ROLLOUTS * (2 * MAX_CALLS + 1)
    store = TraceStore(result.run_dir / "traces")
    traces = [trace for step in range(1, STEPS + 1) for trace in store.read("train", step)]
    assert len(traces) == ROLLOUTS
    for trace in traces:
        assert len(trace.calls) == MAX_CALLS
        assert "".join(call.response["content"] for call in trace.calls) == trace.response
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").open()]
    for row in rows:
        dropped = sum(n for name, n in row.items() if name.startswith("tokens/dropped/"))
        assert row["tokens/sampled"] == row["tokens/trained"] + dropped
    sampled = sum(len(call.completion_ids) for trace in traces for call in trace.calls)
    assert sum(row["tokens/sampled"] for row in rows) == sampled > 0

    # The judge's model was asked again when it said so, until each rollout had its one answer.
    statuses = collections.Counter(status for _, _, status in apis.judged)
    assert statuses[200] == ROLLOUTS
    assert statuses[429] > 0
    for (text, came, status), (again, then, _) in zip(apis.judged, apis.judged[1:], strict=False):
        if status == 429:
            assert again == text
            assert then - came >= WAIT
