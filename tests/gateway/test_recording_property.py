"""Random agents on one gateway: every sampled token is in the right trace, once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import openai
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.examples import few
from tests.kit.toy import ADD_TOOL, StubEngine, gateway_of, ids_of, text_of
from tuner.engines.base import Generation, SamplingParams, TokenSink
from tuner.gateway import Gateway, Session
from tuner.traces import Call, Outcome, RolloutId, TokenTree, Trace
from tuner.training.batch import build_batch

MOVES = [
    *("go_on", "stream", "fork", "parallel", "sub_agent", "compact", "rewrite", "strip", "retry"),
    *("choices", "close_early", "cancel", "truncate", "complete", "abandon_choices"),
]
WORDS = [
    *("yes", "no", " 42", "\n", "é…", "<think>\nwhy\n</think>\n\n", "{", " "),
    '<tool_call>\n{"name": "add", "arguments": {"a":1, "b": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "argu',
]


@dataclass
class Ledger(StubEngine):
    """Writes random words by the request's seed, and keeps every token that it sampled."""

    sampled: list[tuple[str, tuple[int, ...], list[int]]] = field(default_factory=list)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        session: str,
        sink: TokenSink | None = None,
        so_far: Generation | None = None,
    ) -> Generation:
        begun = () if so_far is None else so_far.completion_ids
        rng = random.Random(sampling.seed)
        text = "".join(rng.choices(WORDS, k=rng.randint(0, 5)))
        ids = (*ids_of(text), 257)[: sampling.max_tokens - len(begun)]
        entry: tuple[str, tuple[int, ...], list[int]] = (session, (*prompt_ids, *begun), [])
        self.sampled.append(entry)
        for id_ in ids:
            await asyncio.sleep(0)
            assert sink is not None
            if not sink.push(id_, -0.5, self.version):
                await asyncio.Event().wait()  # until the cancellation comes
            entry[2].append(id_)
        reason: Any = "stop" if ids[-1] == 257 else "length"
        ids = (*begun, *ids)
        return Generation(ids, (-0.5,) * len(ids), (self.version,) * len(ids), reason)


@dataclass
class Agent:
    """Carries out moves; what it knows is the conversations it has had."""

    session: Session
    rng: random.Random
    name: str = ""
    answers: int = 0
    conversations: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = self.name or self.session.id
        self.client = self.session.async_client()
        self.conversations.append(self.fresh("main"))

    def fresh(self, name: str) -> list[Any]:
        return [
            {"role": "system", "content": f"[{self.name}] {name}"},
            {"role": "user", "content": "go"},
        ]

    async def ask(self, messages: list[Any], client: Any = None, **fields: Any) -> list[Any]:
        """The answers to one request, as messages."""
        create = (client or self.client).chat.completions.create
        answer = await create(model="tiny", messages=messages, tools=[ADD_TOOL], **fields)
        self.answers += len(answer.choices)
        return [choice.message.model_dump(exclude_none=True) for choice in answer.choices]

    def remember(self, messages: list[Any], answer: Any) -> None:
        answer = {"content": None, **answer}
        result: list[Any] = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            for call in answer.get("tool_calls", [])
        ]
        result = result or [{"role": "user", "content": "and then?"}]
        self.conversations.append([*messages, answer, *result])

    async def move(self, name: str) -> None:
        messages = list(self.conversations[-1])
        if name in ("fork", "parallel", "choices"):
            messages = list(self.rng.choice(self.conversations))
        if name == "sub_agent":
            messages = self.fresh("helper")
        elif name == "compact":
            summary = {"role": "user", "content": f"so far: {len(messages)} messages"}
            messages = [messages[0], summary]
        elif name in ("rewrite", "strip"):
            messages = [self.changed(message, name) for message in messages]
        await getattr(self, f"do_{name}", self.do_go_on)(messages)

    @staticmethod
    def changed(message: Any, how: str) -> Any:
        if message["role"] != "assistant":
            return message
        content = message.get("content")
        if how == "strip":
            stripped = {key: v for key, v in message.items() if key != "reasoning_content"}
            return {**stripped, "content": content.strip() if content else content}
        return {**message, "content": f"{content}!"}

    async def do_go_on(self, messages: list[Any]) -> None:
        (answer,) = await self.ask(messages)
        self.remember(messages, answer)

    async def do_truncate(self, messages: list[Any]) -> None:
        (answer,) = await self.ask(messages, max_tokens=3)
        self.remember(messages, answer)

    async def do_parallel(self, messages: list[Any]) -> None:
        answers = await asyncio.gather(*(self.ask(messages) for _ in range(3)))
        self.remember(messages, self.rng.choice(answers)[0])

    async def do_choices(self, messages: list[Any]) -> None:
        self.remember(messages, self.rng.choice(await self.ask(messages, n=3)))

    async def do_retry(self, messages: list[Any]) -> None:
        headers = {"Idempotency-Key": f"key-{self.answers}"}
        first, again = await asyncio.gather(
            self.ask(messages, extra_headers=headers), self.ask(messages, extra_headers=headers)
        )
        assert first == again
        self.answers -= 1
        self.remember(messages, first[0])

    async def do_complete(self, messages: list[Any]) -> None:
        prompt = f"[{self.name}] once"
        await self.client.completions.create(model="tiny", prompt=prompt)
        self.answers += 1

    async def do_stream(self, messages: list[Any]) -> None:
        create = self.client.chat.completions.create
        stream = await create(model="tiny", messages=messages, tools=[ADD_TOOL], stream=True)
        content = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        self.answers += 1
        self.remember(messages, {"role": "assistant", "content": content})

    async def do_close_early(self, messages: list[Any]) -> None:
        create = self.client.chat.completions.create
        stream = await create(model="tiny", messages=messages, tools=[ADD_TOOL], stream=True)
        left = self.rng.randint(0, 4)
        async for chunk in stream:
            if chunk.choices[0].finish_reason:
                self.answers += 1
            if left == 0:
                break
            left -= 1
        await stream.close()

    async def do_cancel(self, messages: list[Any], **fields: Any) -> None:
        asked = asyncio.ensure_future(self.ask(messages, **fields))
        for _ in range(self.rng.randint(0, 30)):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})

    async def do_abandon_choices(self, messages: list[Any]) -> None:
        await self.do_cancel(messages, n=3)


async def live(agent: Agent, moves: Sequence[str], ends_after: int | None) -> bool:
    """One rollout. With `ends_after`, its time is up in the middle of a move: True if it was."""

    async def moving() -> None:
        for name in moves:
            await agent.move(name)

    work = asyncio.ensure_future(moving())
    if ends_after is not None:
        for _ in range(ends_after):
            await asyncio.sleep(0)
        agent.session.seal()
    try:
        await work
    except openai.OpenAIError:
        if not agent.session.sealed:
            raise
        return True
    return False


def trace_of(number: int, calls: tuple[Call, ...], timed_out: bool) -> Trace:
    delivered = any(not call.undelivered for call in calls)
    outcome = Outcome.TIMEOUT if timed_out else Outcome.COMPLETED
    return Trace(
        id=RolloutId(1, 0, number),
        task={},
        calls=calls,
        outcome=outcome if delivered or timed_out else Outcome.NO_CALLS,
        reward=float(number) if outcome is Outcome.COMPLETED and delivered else None,
    )


_LIVES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(MOVES), min_size=1, max_size=7),
        st.none() | st.integers(0, 60),
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=few(40), deadline=None)
@given(_LIVES, st.integers(0, 2**32))
def test_every_sampled_token_is_in_the_right_trace_once(lives: list[Any], seed: int) -> None:
    asyncio.run(_drive(lives, seed))


async def _drive(lives: list[Any], seed: int) -> None:
    engine = Ledger(max_model_len=100_000)
    async with gateway_of(engine) as gateway:
        agents = [
            Agent(gateway.open_session(f"rollout-{i}", seed=i), random.Random(f"{seed}-{i}"))
            for i in range(len(lives))
        ]
        cut = await asyncio.gather(
            *(live(agent, *life) for agent, life in zip(agents, lives, strict=True))
        )
        traces = [
            trace_of(i, agent.session.seal(), was_cut)
            for i, (agent, was_cut) in enumerate(zip(agents, cut, strict=True))
        ]
        for agent, trace in zip(agents, traces, strict=True):
            _check_trace(engine, agent, trace)
        _check_batch(engine, traces, random.Random(seed))
        assert_nothing_left(gateway)


def _check_trace(engine: Ledger, agent: Agent, trace: Trace) -> None:
    mine = agent.session.id
    sampled = Counter(
        (prompt, tuple(ids)) for session, prompt, ids in engine.sampled if session == mine and ids
    )
    assert Counter((c.prompt_ids, c.completion_ids) for c in trace.calls) == sampled
    assert all(call.invalid is None for call in trace.calls)
    delivered = [call for call in trace.calls if not call.undelivered]
    if agent.session.sealed and trace.outcome is not Outcome.TIMEOUT:
        assert len(delivered) == agent.answers
    assert len({call.id for call in trace.calls}) == len(trace.calls)
    for call in trace.calls:
        assert f"[{mine}]" in text_of(call.prompt_ids)


def _check_batch(engine: Ledger, traces: list[Trace], rng: random.Random) -> None:
    total = sum(len(ids) for _, _, ids in engine.sampled)
    batch = build_batch(traces)
    assert batch.sampled_tokens == total
    assert batch.trained_tokens + sum(batch.dropped_tokens.values()) == total
    calls = [call for trace in traces for call in trace.calls]
    tree = TokenTree.build(calls)
    for index, call in enumerate(calls):
        assert tree.path(index) == call.prompt_ids + call.completion_ids
    shuffled = [
        replace(trace, calls=tuple(rng.sample(trace.calls, len(trace.calls)))) for trace in traces
    ]
    again = TokenTree.build([call for trace in shuffled for call in trace.calls])
    for name in ("token", "depth", "parent", "end"):
        assert np.array_equal(getattr(tree, name), getattr(again, name))
    mixed = build_batch(rng.sample(shuffled, len(shuffled)))
    assert mixed.dropped_tokens == batch.dropped_tokens
    assert sorted(row.call_id for row in mixed.rows) == sorted(row.call_id for row in batch.rows)


def assert_nothing_left(gateway: Gateway) -> None:
    assert not gateway._sessions
