"""A server that is killed: what was answered is there, and sessions go on where they were."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from tests.kit import forked
from tests.serving.served import ADMIN, MODEL, QUESTION, say, served
from tests.serving.server import free_port, serve
from tuner.serving.serving_store import ServingStore
from tuner.tune import TINY_MODEL


def _serve(folder: Path, port: int) -> None:
    """What it prints is in `server.log`."""
    with (folder / "server.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    serve(folder / "config.yaml", port, admin_key=ADMIN)


class Process:
    """`tuner serve` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.root = f"http://127.0.0.1:{self.port}"
        settings = {
            "project": "p",
            "name": "run",
            "checkpoint_root_dir": str(folder),
            "model": {"model_path": str(TINY_MODEL), "max_model_len": 512},
            "tuner": {"device": "cpu", "reasoning": "keep"},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))

    async def start(self) -> None:
        self.process = forked.begin(_serve, self.folder, self.port)
        async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(120):
            while True:
                assert self.process.is_alive(), (self.folder / "server.log").read_text()
                try:
                    await http.get(f"{self.root}/healthz")
                    return
                except httpx.TransportError:
                    await asyncio.sleep(0.05)

    def end(self, number: int = signal.SIGKILL) -> int | None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.process.join(60)
        return self.process.exitcode

    def client(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.root}/v1", api_key=key, max_retries=0)

    async def control(self, method: str, path: str, body: object = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        async with httpx.AsyncClient(trust_env=False) as http:
            url = f"{self.root}/tuner/v1{path}"
            return await http.request(method, url, json=body, headers=headers)

    def stored(self, session: str) -> list[object]:
        with ServingStore(self.folder / "p/run/serving.sqlite", readonly=True).reader() as store:
            return [one.call for one in store.calls(session)]


@pytest.fixture
async def process(tmp_path):
    process = Process(tmp_path)
    await process.start()
    yield process
    if process.process.is_alive():
        process.end()


async def test_a_conversation_goes_on_with_the_sampled_ids_after_a_kill(process):
    opened = (await process.control("POST", "/sessions", {"task": {"q": 1}})).json()
    client, talk = process.client(opened["key"]), []
    for text in (QUESTION, "why?"):
        await say(client, talk, text)
    process.end()
    before = process.stored(opened["id"])
    assert len(before) == 2
    await process.start()
    await say(process.client(opened["key"]), talk, "so?")
    *same, last = process.stored(opened["id"])
    assert same == before
    whole = (*before[-1].prompt_ids, *before[-1].completion_ids)
    assert last.reused_ids in (len(whole), len(whole) - 1)
    assert last.prompt_ids[: last.reused_ids] == whole[: last.reused_ids]
    rewarded = await process.control("POST", f"/sessions/{opened['id']}/reward", {"reward": 1})
    assert rewarded.json()["reward"] == 1
    call = {"reward": 0, "call": before[0].id}
    rewarded = await process.control("POST", f"/sessions/{opened['id']}/reward", call)
    assert rewarded.json()["call_rewards"] == {before[0].id: 0}


async def test_a_signal_ends_it_and_it_logs_neither_words_nor_keys(process):
    opened = (await process.control("POST", "/sessions", {})).json()
    talk = []
    await say(process.client(opened["key"]), talk, "a very secret word")
    with pytest.raises(openai.AuthenticationError):
        await say(process.client("sk-tuner-wrong"), [], "another secret word")
    for what, body in (("reward", {"reward": 1, "feedback": "secretly good"}), ("end", {})):
        await process.control("POST", f"/sessions/{opened['id']}/{what}", body)
    assert process.end(signal.SIGTERM) == 0
    log = (process.folder / "server.log").read_text()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    asked = [line for line in lines if line.get("path") == "/v1/chat/completions"]
    assert [(line["status"], line["who"], line["session"]) for line in asked] == [
        (200, "session", opened["id"]),
        (401, "nobody", None),
    ]
    names = ("message", "session", "who", "reward")
    done = [tuple(map(line.get, names)) for line in lines if line["message"] != "request"]
    assert [line for line in done if line[1] is not None] == [
        ("open", opened["id"], "admin", None),
        ("reward", opened["id"], "admin", 1.0),
        ("end", opened["id"], "admin", None),
    ]
    for secret in ("secret", "sk-", talk[-1]["content"] or "secret"):
        assert secret not in log
    assert f"at {process.root}/v1" in log
    folder = process.folder / "p/run"
    assert log.endswith(
        f"Stopped. {folder}/serving.sqlite: sessions 1 (1 judged), calls 1.\n"
        f"The same command continues with them; `tuner view {folder}` shows them.\n"
    )


# Below the server ends as it should, and nothing but the store is left of it.


async def test_seeds_and_ids_do_not_come_again_after_a_restart(tmp_path):
    async with served(tmp_path) as asking:
        id_, key = await asking.opened()
        for _ in range(2):
            await say(asking.client(key), [], "hi")
    async with served(tmp_path) as asking:
        await say(asking.client(key), [], "hi")
        calls = [one.call for one in asking.calls(id_)]
    assert len({call.id for call in calls}) == 3
    assert len({call.sampling.seed for call in calls}) == 3


async def use_up(client):
    for _ in range(8):
        await say(client, [], "hi", max_tokens=8)


async def test_limits_count_what_was_before_a_restart(tmp_path):
    async with served(tmp_path) as asking:
        _, key = await asking.opened(limits={"calls": 2})
        _, other = await asking.opened(limits={"tokens": 8})
        for one in (key, other):
            await say(asking.client(one), [], "hi", max_tokens=8)
    async with served(tmp_path) as asking:
        await say(asking.client(key), [], "hi")
        for one, limit in ((key, "max_calls"), (other, "max_tokens")):
            with pytest.raises(openai.PermissionDeniedError, match=limit):
                await use_up(asking.client(one))


async def test_a_response_is_gone_on_from_after_a_restart(tmp_path):
    async def answer(asking, key, text, **asked):
        client = asking.client(key)
        return await client.responses.create(
            model=MODEL, input=text, max_output_tokens=40, temperature=0, **asked
        )

    async with served(tmp_path) as asking:
        id_, key = await asking.opened()
        first = await answer(asking, key, QUESTION)
    async with served(tmp_path) as asking:
        await answer(asking, key, "why?", previous_response_id=first.id)
        before, after = (one.call for one in asking.calls(id_))
    whole = (*before.prompt_ids, *before.completion_ids)
    assert after.prompt_ids[: after.reused_ids] in (whole, whole[:-1])
    assert after.reused_ids > len(before.prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_after_a_restart_gets_the_stored_reply(tmp_path, stream):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    body["max_tokens"] = 12

    async def ask(asking, **other):
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "k"}
        return await asking.http.post("/v1/chat/completions", json=body | other, headers=headers)

    async with served(tmp_path) as asking:
        id_, key = await asking.opened()
        first = await ask(asking)
        assert (await ask(asking)).content == first.content
    async with served(tmp_path) as asking:
        assert (await ask(asking)).content == first.content
        assert (await ask(asking, max_tokens=3)).status_code == 400
        assert len(asking.calls(id_)) == 1


async def test_a_call_whose_reply_was_not_kept_is_sampled_again_and_undelivered(tmp_path):
    key = {"extra_headers": {"Idempotency-Key": "k"}}
    async with served(tmp_path) as asking:
        id_, own = await asking.opened()
        await say(asking.client(own), [], "hi", **key)
        asking.server.store.forget_replies(2**40)  # as where it died between the two
    async with served(tmp_path) as asking:
        await say(asking.client(own), [], "hi", **key)
        assert [one.call.undelivered for one in asking.calls(id_)] == [True, False]
        assert asking.server.store.session(id_).calls == 2


async def test_an_application_goes_on_in_its_session_after_a_restart(tmp_path):
    talk = []
    async with served(tmp_path) as asking:
        key = await asking.application()
        first = (await say(asking.client(key), talk, QUESTION)).headers["x-tuner-session"]
    async with served(tmp_path) as asking:
        then = (await say(asking.client(key), talk, "why?")).headers["x-tuner-session"]
        calls = [one.call for one in asking.calls(first)]
    assert then == first
    assert calls[1].reused_ids >= len(calls[0].prompt_ids)


async def test_a_session_that_is_opened_again_with_its_key_is_the_same_after_a_restart(tmp_path):
    asked = {"json": {}, "headers": {"Idempotency-Key": "k"}}
    async with served(tmp_path) as asking:
        first = (await asking.control("POST", "/sessions", **asked)).json()
    async with served(tmp_path) as asking:
        again = (await asking.control("POST", "/sessions", **asked)).json()
    assert [again["id"], again["key"]] == [first["id"], first["key"]]


async def test_no_key_is_on_disk(tmp_path):
    async with served(tmp_path) as asking:
        application = await asking.application()
        _, own = await asking.opened(application)
        await say(asking.client(own), [], "hi")
        await say(asking.client(application), [], "hi")
        await asking.server.tidy()
    for path in (tmp_path / "p/served").rglob("*"):
        if path.is_file():
            for key in (ADMIN, application, own):
                assert key.encode() not in path.read_bytes(), path


async def test_two_servers_do_not_share_a_run(tmp_path):
    from tests.serving.served import config_of
    from tuner.errors import ConfigError
    from tuner.runs.directory import held
    from tuner.serving.hosting import serve

    config = config_of(tmp_path)
    with held(config.run_dir), pytest.raises(ConfigError, match="is in use by"):
        await asyncio.to_thread(serve, config)
