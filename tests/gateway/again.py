"""A framework's agent, run again from a recorded rollout: the same up to the point, bit for bit.

The agent is asked "2+40?" and has a tool `add`. Its model reasons, calls the tool twice at once,
then once, and answers: three calls, in which every number is drawn by the request's seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from tests.kit.toy import TEMPLATE, StubEngine, ids_of, text_of, tokenizer
from tuner.engines.base import Generation, SamplingParams, TokenSink
from tuner.gateway import ChatRenderer, Gateway, Session
from tuner.gateway.script import Script
from tuner.gateway.service import Reply, StreamReply
from tuner.traces import Call, Outcome, RolloutId, Trace

QUESTION = "2+40?"
_RESULT = "<tool_response>\\n' + content"
# What another id of a tool call would change, it changes in the prompt.
SHOWS_IDS = TEMPLATE.replace(_RESULT, "<tool_response ' + message.tool_call_id + '>\\n' + content")

_TWO_DIGITS = "{:02d}"
_REASONED = f"<think>\n{_TWO_DIGITS} it is\n</think>\n\n"
_TOOL = '<tool_call>\n{{"name": "add", "arguments": {{"a": 1{:02d}, "b": 1{:02d}}}}}\n</tool_call>'
# By the results that are in the prompt. What is drawn has always as many letters, so that the
# beginning of one text and the end of another are a text of the same kind.
_TEXTS = {
    0: f"{_REASONED}I add.\n{_TOOL}\n{_TOOL}",
    2: f"{_REASONED}{_TOOL}",
    3: f"{_REASONED}The answer is {_TWO_DIGITS}.",
}

OWN = ("started", "seconds", "replayed")


def recorded(calls: Sequence[Call], number: int = 0) -> Trace:
    return Trace(RolloutId(1, 0, number), {}, tuple(calls), Outcome.COMPLETED, 1.0)


def seen(call: Call) -> dict[str, Any]:
    """What of a call must be the same when it is given back."""
    return {f.name: getattr(call, f.name) for f in fields(call) if f.name not in OWN}


def without_seed(call: Call) -> dict[str, Any]:
    """A session's own seed is that of its sampling, whether anything is sampled or not."""
    return seen(replace(call, sampling=replace(call.sampling, seed=0)))


@dataclass
class Drawing(StubEngine):
    """Says what the results in its prompt ask for, with numbers and log-probs by its seed."""

    max_model_len: int = 100_000
    grammars: bool = True  # and keeps to them: its arguments are integers
    goes_on: Literal["never", "in_parts", "always"] = "always"

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
        so_far: Generation | None = None,
    ) -> Generation:
        self.requests.append((tuple(prompt_ids), sampling, session))
        dice = random.Random(sampling.seed)
        text = _TEXTS[text_of(prompt_ids).count("<tool_response ")]
        numbers = [dice.randrange(100) for _ in range(text.count("{:"))]
        begun = so_far or Generation((), (), (), "stop")
        new = (*ids_of(text.format(*numbers)), tokenizer().eos_token_id)
        new = new[len(begun.completion_ids) :]
        logprobs = tuple(-dice.random() for _ in new)
        for id_, logprob in zip(new, logprobs, strict=True):
            await asyncio.sleep(0)
            if sink is not None:
                sink.push(id_, logprob, self.version)
        return Generation(
            (*begun.completion_ids, *new),
            (*begun.logprobs, *logprobs),
            (*begun.versions, *(self.version for _ in new)),
            "stop",
        )


class Overhearing(Gateway):
    """Keeps the requests of each session as they were sent."""

    def __init__(self, engine: StubEngine) -> None:
        renderer = ChatRenderer(tokenizer(), chat_template=SHOWS_IDS)
        super().__init__(engine, renderer, model_name="tiny")
        self.heard: list[Any] = []

    async def handle(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Reply | StreamReply:
        self.heard.append(json.loads(body))
        return await super().handle(method, path, headers, body)


@dataclass(frozen=True)
class Life:
    """A rollout: its calls, the requests as they were sent, and what the agent made of them."""

    calls: tuple[Call, ...]
    heard: list[Any]
    came_to: Any


class _Race:
    """Where two tools wait that run at once: the second ends before the first."""

    def __init__(self) -> None:
        self._begun = 0
        self._overtaken = asyncio.Event()

    async def wait(self) -> None:
        self._begun += 1
        if self._begun == 1:
            await asyncio.wait_for(self._overtaken.wait(), 20)
            for _ in range(100):  # until what the second said is where the agent puts it
                await asyncio.sleep(0)
        else:
            self._overtaken.set()


async def _at_once() -> None:
    pass


def races() -> Iterator[Callable[[], Awaitable[None]]]:
    """What the tools of one rollout after the other wait for: in every other rollout the second of
    the two that run at once ends before the first."""
    while True:
        yield _Race().wait
        yield _at_once


Agent = Callable[[Session], Awaitable[Any]]
"""Runs an agent on a session to its end; gives what it came to."""


@contextlib.asynccontextmanager
async def overhearing() -> AsyncIterator[tuple[Overhearing, Drawing]]:
    engine = Drawing()
    gateway = Overhearing(engine)
    try:
        yield gateway, engine
    finally:
        await gateway.aclose()


async def lived(gateway: Overhearing, agent: Agent, seed: int, script: Script | None) -> Life:
    gateway.heard = []
    session = gateway.open_session(f"rollout {seed}", seed=seed, script=script)
    came_to = await agent(session)
    return Life(session.seal(), gateway.heard, came_to)


async def what_differs(agent: Agent) -> str:
    """Where an agent leaves its own rollout when that is run again; "" if it does not."""
    async with overhearing() as (gateway, _):
        first = await lived(gateway, agent, 1, None)
        script = Script(recorded(first.calls))
        await lived(gateway, agent, 2, script)
        return str(script.end() or "")


async def check_goes_back(agent: Agent, *, dialect: str, streamed: bool) -> None:
    """A whole rollout is given back, and branches begin before its second call and inside it."""
    async with overhearing() as (gateway, engine):
        first = await lived(gateway, agent, 1, None)
        assert {(call.dialect, call.streamed) for call in first.calls} == {(dialect, streamed)}
        assert [len(call.response.get("tool_calls") or ()) for call in first.calls] == [2, 1, 0]
        # Before the second call, in its reasoning, before its last digit, before its end.
        ids = first.calls[1].completion_ids
        tokens = (0, 3, len(ids) - len(ids_of("0}}\n</tool_call>")) - 1, len(ids) - 1)
        await _check_whole(gateway, engine, agent, first)
        for seed, token in enumerate(tokens, start=3):
            await _check_branch(gateway, engine, agent, first, seed, token)


async def _check_whole(gateway: Overhearing, engine: Drawing, agent: Agent, first: Life) -> None:
    sampled = len(engine.requests)
    script = Script(recorded(first.calls), ends=True)
    again = await lived(gateway, agent, 2, script)
    assert script.end() is None
    assert len(engine.requests) == sampled
    assert list(map(without_seed, again.calls)) == list(map(without_seed, first.calls))
    assert again.heard == first.heard
    assert again.came_to == first.came_to


async def _check_branch(
    gateway: Overhearing, engine: Drawing, agent: Agent, first: Life, seed: int, token: int
) -> None:
    sampled = len(engine.requests)
    script = Script(recorded(first.calls), calls=1, token=token)
    branch = await lived(gateway, agent, seed, script)
    assert script.end() is None
    assert len(engine.requests) == sampled + len(first.calls) - 1
    assert branch.heard[:2] == first.heard[:2]
    assert without_seed(branch.calls[0]) == without_seed(first.calls[0])
    old, new = first.calls[1], branch.calls[1]
    assert new.prompt_ids == old.prompt_ids
    assert new.completion_ids[:token] == old.completion_ids[:token]
    assert new.logprobs[:token] == old.logprobs[:token]
    whole = len(first.calls[0].completion_ids)
    assert [call.replayed for call in branch.calls] == [whole, token, 0]
    assert new.logprobs[token] != old.logprobs[token]
    assert (new.id == old.id) == (token > 0)
