"""Keys, sealing, cancellation, replay and many sessions at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import tracemalloc

import openai
import pytest

from tests.engines.models import until
from tests.kit.clock import jump
from tests.kit.toy import StubEngine, gateway_of, text_of
from tuner.gateway import Gateway, Session
from tuner.gateway import app as routes
from tuner.gateway.sessions import CutOff, InFlight

USER = [{"role": "user", "content": "hi"}]


def ask(session: Session, **fields):
    client = session.async_client()
    return client.chat.completions.create(model="tiny", messages=USER, **fields)


async def test_keys_differ_and_a_wrong_one_gets_a_sentence() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        assert session.key != gateway.open_session("r").key
        stranger = session.async_client().with_options(api_key="sk-guess")
        with pytest.raises(openai.AuthenticationError, match="no open session"):
            await stranger.chat.completions.create(model="tiny", messages=USER)


@pytest.mark.long
async def test_what_is_remembered_of_ended_sessions_is_little_and_bounded(monkeypatch) -> None:
    monkeypatch.setattr(routes, "_REMEMBERED_KEYS", 3000)
    async with gateway_of(StubEngine()) as gateway:

        def end(first: int, last: int) -> int:
            for number in range(first, last):
                gateway.open_session(f"train-{number}-1-1-1").seal()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        end(0, 20)
        tracemalloc.start()
        try:
            before = end(20, 21)
            assert end(21, 2021) - before < 2000 * 500
            full = end(2021, 3021)
            assert end(3021, 5021) - full < 100_000
        finally:
            tracemalloc.stop()


async def test_sealed_session_refuses_later_calls_with_a_sentence() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("train-1-2-3")
        await ask(session)
        calls = session.seal()
        assert len(calls) == 1
        with pytest.raises(openai.ConflictError, match=r"train-1-2-3.*has ended"):
            await ask(session)
        with pytest.raises(openai.ConflictError, match="has ended"):
            await session.async_client().models.list()
        assert session.calls == session.seal() == calls


async def test_sealing_cancels_what_is_in_flight_and_keeps_it_out_of_the_trace() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        late = asyncio.ensure_future(ask(session))
        await engine.until_waiting()
        assert session.seal() == ()
        with pytest.raises(openai.ConflictError, match="has ended"):
            await late
        assert engine.cancelled == 1
        assert session.calls == ()


async def test_a_completion_that_arrives_while_sealing_is_refused_not_recorded() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        late = asyncio.ensure_future(ask(session))
        await engine.until_waiting()
        engine.gate.set()
        await asyncio.sleep(0)  # the engine runs on, the answer is not yet committed
        session.seal()
        with pytest.raises(openai.ConflictError, match="has ended"):
            await late
        assert session.calls == ()


async def test_cancelled_client_call_cancels_generation_and_records_nothing() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        call = asyncio.ensure_future(ask(session))
        await engine.until_waiting()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (engine.cancelled, engine.waiting, session.calls) == (1, 0, ())
        engine.gate.set()
        assert (await ask(session)).choices[0].message.content == "ok"


async def test_the_clients_timeout_is_honoured() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        call = asyncio.ensure_future(ask(session, timeout=60))
        await engine.until_waiting()
        jump(60)
        with pytest.raises(openai.APITimeoutError):
            await call
        assert engine.cancelled == 1


async def test_a_time_limit_set_on_the_client_is_honoured() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        client = gateway.open_session("r").async_client()
        client.timeout = 0.02
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="tiny", messages=USER)


async def test_call_is_committed_before_the_agent_sees_the_answer() -> None:
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        seen: list[int] = []
        handle = gateway.handle

        async def watched(*arguments):
            reply = await handle(*arguments)
            seen.append(len(session.calls))
            return reply

        gateway.handle = watched  # type: ignore[method-assign]
        await ask(session)
        assert seen == [1]


async def test_retry_with_the_idempotency_key_replays_the_committed_call() -> None:
    engine = StubEngine(["first", "second"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        headers = {"Idempotency-Key": "k1"}
        first = await ask(session, extra_headers=headers)
        again = await ask(session, extra_headers=headers)
        assert first == again
        assert len(session.calls) == len(engine.requests) == 1
        other = await ask(session)
        assert other.choices[0].message.content == "second"
        with pytest.raises(openai.BadRequestError, match=r"idempotency key 'k1'"):
            await ask(session, extra_headers=headers, temperature=0.5)


async def test_retry_that_overtakes_the_first_attempt_waits_for_it() -> None:
    engine = StubEngine(["first", "second"])
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        headers = {"Idempotency-Key": "k1"}
        both = [asyncio.ensure_future(ask(session, extra_headers=headers)) for _ in range(2)]
        await engine.until_waiting()
        engine.gate.set()
        one, two = await asyncio.gather(*both)
        assert one == two
        assert len(engine.requests) == 1


async def test_failed_attempt_leaves_its_idempotency_key_free() -> None:
    engine = StubEngine([RuntimeError("once"), "fine"])
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        headers = {"Idempotency-Key": "k1"}
        with pytest.raises(openai.InternalServerError):
            await ask(session, extra_headers=headers)
        assert (await ask(session, extra_headers=headers)).choices[0].message.content == "fine"


async def test_calls_of_many_sessions_at_once_stay_apart() -> None:
    def echo(prompt: str, sampling: object) -> str:
        return prompt.split("user\n")[-1].split("<|im_end|>")[0]

    async with gateway_of(StubEngine(answer=echo)) as gateway:

        async def rollout(number: int) -> Session:
            session = gateway.open_session(f"r{number}", seed=number)
            client = session.async_client()
            for turn in range(3):
                message = {"role": "user", "content": f"{number}/{turn}"}
                answer = await client.chat.completions.create(model="tiny", messages=[message])
                assert answer.choices[0].message.content == f"{number}/{turn}"
            return session

        sessions = await asyncio.gather(*(rollout(number) for number in range(40)))
        for number, session in enumerate(sessions):
            texts = [text_of(call.completion_ids) for call in session.calls]
            assert texts == [f"{number}/{turn}<|im_end|>" for turn in range(3)]


async def test_clients_in_other_threads_and_loops_reach_the_engines_loop() -> None:
    loops = set()

    class Watched(StubEngine):
        async def generate(self, *arguments):
            loops.add(asyncio.get_running_loop())
            return await super().generate(*arguments)

    async with gateway_of(Watched()) as gateway:
        session = gateway.open_session("r")
        await ask(session)

        def elsewhere() -> str:
            answer = asyncio.run(_answer(session))
            return str(answer.choices[0].message.content)

        assert await asyncio.to_thread(elsewhere) == "ok"
        assert loops == {asyncio.get_running_loop()}
        assert len(session.calls) == 2


async def test_cancelling_a_client_in_another_loop_cancels_generation() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")

        async def impatient() -> None:
            call = asyncio.ensure_future(_answer(session))
            await engine.until_waiting()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

        await asyncio.to_thread(lambda: asyncio.run(impatient()))
        await until(lambda: engine.cancelled == 1 and engine.waiting == 0)
        assert session.calls == ()


async def _answer(session: Session):
    return await ask(session)


async def test_generation_seconds_count_overlapping_calls_once() -> None:
    engine = StubEngine()
    engine.gate.clear()
    async with gateway_of(engine) as gateway:
        session = gateway.open_session("r")
        started = time.perf_counter()
        calls = [asyncio.ensure_future(ask(session)) for _ in range(4)]
        await engine.until_waiting(4)
        await asyncio.sleep(0.05)
        engine.gate.set()
        await asyncio.gather(*calls)
        assert 0.05 <= session.in_flight.seconds <= time.perf_counter() - started
        before = session.in_flight.seconds
        await asyncio.sleep(0.02)
        assert session.in_flight.seconds == before


async def test_closing_one_sessions_client_leaves_the_others_open() -> None:
    async with gateway_of(StubEngine()) as gateway:
        one, two = (gateway.open_session(name).async_client() for name in "ab")
        await one.close()
        answer = await two.chat.completions.create(model="tiny", messages=USER)
        assert answer.choices[0].message.content == "ok"


def test_gateway_without_a_loop_says_so() -> None:
    gateway = Gateway(StubEngine(), None, model_name="tiny")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="event loop"):
        _ = gateway.base_url
    assert threading.active_count() >= 1


async def test_what_is_cut_off_ends_and_its_task_goes_on() -> None:
    in_flight, never = InFlight(), asyncio.Event()

    async def asking() -> str:
        with pytest.raises(CutOff):
            await in_flight.run(never.wait())
        await asyncio.sleep(0)  # nothing is asked of the task any more
        task = asyncio.current_task()
        return "told" if task and not task.cancelling() and not in_flight.tasks else "cancelled"

    task = asyncio.ensure_future(asking())
    await until(lambda: len(in_flight.tasks) == 1)
    in_flight.cancel()
    assert await task == "told"


async def test_what_has_just_ended_is_not_cut_off() -> None:
    in_flight, ready = InFlight(), asyncio.Event()

    async def asking() -> str:
        await in_flight.run(ready.wait())
        await asyncio.sleep(0.05)
        return "answered"

    task = asyncio.ensure_future(asking())
    await until(lambda: len(in_flight.tasks) == 1)
    ready.set()
    asyncio.get_running_loop().call_soon(in_flight.cancel)  # comes when it has gone on
    assert await task == "answered"


async def test_who_generates_around_it_is_cut_off_whole() -> None:
    in_flight, never = InFlight(), asyncio.Event()

    async def asking() -> None:
        with in_flight.here():
            await in_flight.run(never.wait())

    task = asyncio.ensure_future(asking())
    await until(lambda: len(in_flight.tasks) == 2)
    in_flight.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not in_flight.tasks


async def test_who_is_cancelled_as_well_is_cancelled() -> None:
    in_flight, never = InFlight(), asyncio.Event()
    task = asyncio.ensure_future(in_flight.run(never.wait()))
    await until(lambda: len(in_flight.tasks) == 1)
    in_flight.cancel()
    asyncio.get_running_loop().call_soon(task.cancel)  # before it hears of the other
    with pytest.raises(asyncio.CancelledError):
        await task
