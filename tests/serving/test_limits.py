"""What is not let in, not kept, or not kept for ever."""

import asyncio
import sys

import openai
import pytest

from tests.serving.served import MODEL, QUESTION, config_of, say, served, until
from tuner.cli import require_libraries
from tuner.errors import ConfigError, MissingDependencyError
from tuner.serving.hosting import admin_key_for
from tuner.serving.routing import Rates, TooOften


async def test_a_key_that_asks_too_often_is_told_when_to_come_again(tmp_path):
    async with served(tmp_path, "tuner.serving.requests_per_minute=12") as asking:
        _, key = await asking.opened()
        _, other = await asking.opened()  # with the admin's key: it has two at once
        refused = await asking.control("POST", "/sessions", json={})
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 5
        for _ in range(2):
            await say(asking.client(key), [], "hi")
        with pytest.raises(openai.RateLimitError) as error:
            await say(asking.client(key), [], "hi")
        assert 1 <= int(error.value.response.headers["Retry-After"]) <= 5
        await say(asking.client(other), [], "hi")


def test_a_bucket_fills_with_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tuner.serving.routing.time.monotonic", lambda: now[0])
    rates = Rates(60)
    for _ in range(10):
        rates.take("k")
    with pytest.raises(TooOften):
        rates.take("k")
    rates.take("other")
    now[0] += 1
    rates.take("k")
    with pytest.raises(TooOften):
        rates.take("k")


async def test_a_large_body_is_refused_at_both_doors(tmp_path):
    async with served(tmp_path, "tuner.serving.max_body_bytes=2000") as asking:
        id_, key = await asking.opened()
        with pytest.raises(openai.APIStatusError, match="larger than 2000 bytes"):
            await say(asking.client(key), [], "x" * 3000)
        said = {"feedback": "x" * 3000}
        answer = await asking.control("POST", f"/sessions/{id_}/reward", json=said)
        assert answer.status_code == 413
        assert "larger than 2000 bytes" in answer.json()["error"]["message"]


async def test_only_known_names_are_asked(tmp_path):
    async with served(tmp_path, "tuner.serving.allowed_hosts=[Agents.example]") as asking:
        for host, status in [
            ("agents.example", 201),
            ("agents.example:443", 201),
            ("localhost:1", 201),
            ("evil.example", 421),
            ("agents.example.evil.example", 421),
        ]:
            answer = await asking.control("POST", "/sessions", json={}, headers={"Host": host})
            assert answer.status_code == status, host
        through = {"Host": "agents.example", "X-Forwarded-Proto": "https"}
        answer = await asking.control("POST", "/sessions", json={}, headers=through)
        assert answer.json()["base_url"] == "https://agents.example/v1"


def test_other_hosts_need_an_admin_key(tmp_path, monkeypatch):
    config = config_of(tmp_path, "tuner.serving.admin_key_env=SOME_KEY")
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert admin_key_for(config, "127.0.0.1") != admin_key_for(config, "localhost")
    with pytest.raises(ConfigError, match="SOME_KEY"):
        admin_key_for(config, "0.0.0.0")
    monkeypatch.setenv("SOME_KEY", "sk-long")
    assert admin_key_for(config, "0.0.0.0") == "sk-long"
    monkeypatch.setenv("SOME_KEY", "sk.long")
    with pytest.raises(ConfigError, match="dot"):
        admin_key_for(config, "127.0.0.1")


def test_without_its_libraries_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependencyError, match=r"\[serve\]"):
        require_libraries()


async def test_a_session_without_a_call_ends_by_itself(tmp_path):
    async with served(tmp_path, "tuner.serving.idle_minutes=5") as asking:
        id_, key = await asking.opened()
        other, _ = await asking.opened()
        store = asking.server.store
        store.change("UPDATE sessions SET opened = opened - 301 WHERE id = ?", id_)
        await asking.server.tidy()
        assert store.session(id_).ended is not None
        assert store.session(other).ended is None
        with pytest.raises(openai.ConflictError, match="has ended"):
            await say(asking.client(key), [], "hi")


async def test_old_sessions_are_deleted_and_open_ones_stay(tmp_path):
    async with served(tmp_path, "tuner.serving.keep_days=2") as asking:
        ids = [(await asking.opened())[0] for _ in range(3)]
        for id_ in ids[:2]:
            await asking.control("POST", f"/sessions/{id_}/end")
        old = "UPDATE sessions SET opened = opened - 200000, ended = ended - 200000 WHERE id <> ?"
        asking.server.store.change(old, ids[1])
        await asking.server.tidy()
        assert asking.ids() == ids[1:]


async def test_what_is_cut_off_is_stored_as_undelivered(tmp_path):
    async with served(tmp_path) as asking:
        id_, key = await asking.opened()
        client = asking.client(key)
        ends = asking.server.stack.gateway.renderer.turn_ends
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            max_tokens=450,
            logit_bias={str(end): -100 for end in ends},  # it goes on to the limit
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await asking.control("POST", f"/sessions/{id_}/end")
        calls = asking.calls(id_)
        await stream.close()
    assert [one.call.undelivered for one in calls] == [True]
    assert calls[0].call.sampled_tokens > 0


async def test_what_is_in_flight_neither_rests_nor_ends_with_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr("tuner.serving.routing.RESTING_SECONDS", -1)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60}
    async with served(tmp_path) as asking:
        id_, key = await asking.opened()
        client = openai.AsyncOpenAI(base_url=f"{asking.root}/v1", api_key=key, max_retries=0)
        answer = asyncio.ensure_future(client.chat.completions.create(**asked))
        live = asking.server.live
        # A session is busy while it is loaded, too, before it is in memory.
        await until(lambda: (live.count and live.busy(id_)) or answer.done())
        assert not answer.done()
        live.rest()
        assert live.count == 1
    tokens = (await answer).usage.completion_tokens
    await client.close()
    async with served(tmp_path) as asking:
        (stored,) = asking.calls(id_)
        assert (stored.call.undelivered, stored.call.sampled_tokens) == (False, tokens)


async def test_sessions_that_rest_are_made_again(tmp_path, monkeypatch):
    async with served(tmp_path) as asking:
        id_, key = await asking.opened()
        talk = []
        await say(asking.client(key), talk, QUESTION)
        monkeypatch.setattr("tuner.serving.routing.RESTING_SECONDS", -1)
        await asking.server.tidy()
        assert asking.server.live.count == 0
        await asyncio.gather(*(say(asking.client(key), list(talk), "why?") for _ in range(3)))
        calls = [one.call for one in asking.calls(id_)]
        assert len({call.id for call in calls}) == 4
        assert all(call.reused_ids >= len(calls[0].prompt_ids) for call in calls[1:])
        await until(lambda: not asking.server.live.busy(id_))
