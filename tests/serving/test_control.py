"""The control API: who may ask what, what is answered, and that its description says so."""

import re

import jsonschema
import openai
import pytest

from tests.serving.served import ADMIN, say, served
from tuner.traces.store import trace_from_json


@pytest.fixture
async def asking(tmp_path):
    async with served(tmp_path) as asking:
        yield asking


async def test_a_session_is_opened_used_judged_and_ended(asking):
    given = {
        "task": {"question": "2+40?"},
        "group": "g",
        "metadata": {"user": 7},
        "tags": ["a"],
        "sampling": {"temperature": 0.5, "max_tokens": 9},
    }
    id_, key = await asking.opened(**given)
    assert re.fullmatch(r"s-[0-9a-f]{24}", id_)
    assert key.startswith("sk-tuner-")
    await say(asking.client(f"{key}.solver"), [], "2+40?", max_tokens=None, temperature=None)
    (stored,) = asking.calls(id_)
    assert stored.call.role == "solver"
    assert (stored.call.sampling.temperature, stored.call.sampling.max_tokens) == (0.5, 9)
    path = f"/sessions/{id_}"
    calls = (await asking.control("GET", f"{path}/calls", key)).json()["calls"]
    assert [(one["id"], one["tokens"]) for one in calls] == [
        (stored.call.id, stored.call.sampled_tokens)
    ]
    await asking.control("POST", f"{path}/reward", key, json={"reward": 1, "feedback": "good"})
    await asking.control("POST", f"{path}/reward", json={"reward": 0.5})
    said = {"reward": -1, "call": stored.call.id}
    await asking.control("POST", f"{path}/reward", key, json=said)
    for _ in range(2):
        ended = (await asking.control("POST", f"{path}/end", key)).json()
    known = (await asking.control("GET", path, key)).json()
    assert known == ended
    assert (
        known.items()
        >= {
            "id": id_,
            "group": "g",
            "task": {"question": "2+40?"},
            "metadata": {"user": 7},
            "tags": ["a"],
            "state": "ended",
            "calls": 1,
            "versions": [0, 0],
            "reward": 0.5,
            "feedback": "good",
            "call_rewards": {stored.call.id: -1.0},
            "judged": True,
            "trained": False,
        }.items()
    )


async def test_an_ended_session_takes_rewards_and_no_calls(asking):
    id_, key = await asking.opened()
    await asking.control("POST", f"/sessions/{id_}/end")
    with pytest.raises(openai.ConflictError, match="open a new session") as refused:
        await say(asking.client(key), [], "hi")
    assert refused.value.response.headers["x-should-retry"] == "false"  # its client repeats a 409
    late = await asking.control("POST", f"/sessions/{id_}/reward", key, json={"reward": 0})
    assert late.json()["judged"]


@pytest.mark.parametrize("key", [None, "sk-wrong", "sk-tuner-wrong", "sk-app-wrong"])
async def test_without_a_known_key_nothing_answers_and_nothing_is_left(asking, key):
    id_, _ = await asking.opened()
    before = asking.server.store.session(id_)
    asked = [
        ("POST", "/tuner/v1/sessions", {}),
        ("GET", f"/tuner/v1/sessions/{id_}", None),
        ("GET", f"/tuner/v1/sessions/{id_}/calls", None),
        ("GET", f"/tuner/v1/sessions/{id_}/export", None),
        ("POST", f"/tuner/v1/sessions/{id_}/reward", {"reward": 1}),
        ("POST", f"/tuner/v1/sessions/{id_}/end", {}),
        ("DELETE", f"/tuner/v1/sessions/{id_}", None),
        ("POST", "/tuner/v1/applications", {"name": "x"}),
        ("GET", "/tuner/v1/models", None),
        ("POST", "/tuner/v1/rollback", {}),
        ("GET", "/tuner/v1/openapi.json", None),
        ("POST", "/v1/chat/completions", {"model": "tiny_math", "messages": []}),
        ("GET", "/v1/models", None),
        ("POST", "/v1/nothing", {}),
    ]
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    for method, path, body in asked:
        answer = await asking.http.request(method, path, json=body, headers=headers)
        assert answer.status_code == 401, (method, path)
        assert "is not valid here" in answer.json()["error"]["message"]
    assert asking.ids() == [id_]
    assert asking.server.store.session(id_) == before
    assert asking.server.store.ask("SELECT COUNT(*) FROM rewards") == [(0,)]
    assert asking.server.store.applications() == []


async def test_the_key_of_another_session_opens_nothing(asking):
    (id_, _), (_, other) = await asking.opened(), await asking.opened()
    for method, path, body in [
        ("GET", "", None),
        ("GET", "/calls", None),
        ("POST", "/reward", {"reward": 1}),
        ("POST", "/end", {}),
        ("GET", "/export", None),
        ("DELETE", "", None),
    ]:
        answer = await asking.control(method, f"/sessions/{id_}{path}", other, json=body)
        assert answer.status_code == 401
    found = asking.server.store.session(id_)
    assert (found.judged, found.ended) == (False, None)


async def test_an_application_sees_its_own_sessions_alone(asking):
    shop, bank = await asking.application("shop"), await asking.application("bank")
    own, _ = await asking.opened(shop)
    other, key = await asking.opened(bank)
    listed = (await asking.control("GET", "/sessions", shop)).json()
    assert [one["id"] for one in listed["sessions"]] == [own]
    for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/export")]:
        answer = await asking.control(method, f"/sessions/{other}{path}", shop)
        assert answer.status_code == 404
    asked = await asking.control("GET", "/sessions", shop, params={"application": "bank"})
    assert asked.status_code == 403
    assert (await asking.control("POST", "/sessions", key, json={})).status_code == 403
    assert (await asking.control("GET", f"/sessions/{other}/export", key)).status_code == 403
    for method, path in [("POST", "/applications"), ("GET", "/models"), ("POST", "/rollback")]:
        body = {"name": "x"} if method == "POST" else None
        assert (await asking.control(method, path, shop, json=body)).status_code == 403
    everything = (await asking.control("GET", "/sessions")).json()["sessions"]
    assert [one["application"] for one in everything] == ["shop", "bank"]


async def test_an_application_that_is_deleted_has_no_key(asking):
    key = await asking.application()
    again = await asking.control("POST", "/applications", json={"name": "shop"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "application_exists")
    listed = (await asking.control("GET", "/applications")).json()["applications"]
    assert [one["name"] for one in listed] == ["shop"]
    assert (await asking.control("POST", "/sessions", key, json={})).status_code == 201  # known
    assert (await asking.control("DELETE", "/applications/shop")).status_code == 204
    assert (await asking.control("DELETE", "/applications/shop")).status_code == 404
    assert (await asking.control("POST", "/sessions", key, json={})).status_code == 401


async def test_lists_come_in_pages(asking):
    opened = [(await asking.opened(tags=["even"] if n % 2 == 0 else []))[0] for n in range(5)]
    assert opened == sorted(opened)
    found, after = [], ""
    while after is not None:
        asked = {"limit": 2, "after": after}
        page = (await asking.control("GET", "/sessions", params=asked)).json()
        found += [one["id"] for one in page["sessions"]]
        after = page["next"]
    assert found == opened
    even = (await asking.control("GET", "/sessions", params={"tag": "even"})).json()
    assert [one["id"] for one in even["sessions"]] == opened[::2]


async def test_what_is_asked_again_with_its_key_opens_one_session(asking):
    asked = {"json": {"group": "g"}, "headers": {"Idempotency-Key": "k"}}
    first = (await asking.control("POST", "/sessions", **asked)).json()
    again = (await asking.control("POST", "/sessions", **asked)).json()
    assert again == first
    other = {**asked, "json": {"group": "h"}}
    refused = await asking.control("POST", "/sessions", **other)
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        409,
        "idempotency_key_reused",
    )
    # The same key of somebody else is another one.
    theirs = await asking.control("POST", "/sessions", await asking.application(), **asked)
    assert theirs.json()["id"] != first["id"]
    await say(asking.client(again["key"]), [], "hi")
    assert len(asking.calls(first["id"])) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/reward", {}, None),
        ("/reward", {"reward": "1"}, "reward"),
        ("/reward", {"reward": True}, "reward"),
        ("/reward", {"reward": 1, "score": 2}, "score"),
        ("/reward", b'{"reward": NaN}', None),
        ("/reward", b'{"reward": 1e999}', None),
        ("/reward", b"{", None),
        ("", {"limits": {"calls": 0}}, "limits.calls"),
        ("", {"sampling": {"top_p": 2}}, "sampling.top_p"),
        ("", {"task": "text"}, "task"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(asking, path, body, param):
    id_, _ = await asking.opened()
    where = f"/sessions/{id_}{path}" if path else "/sessions"
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = await asking.control("POST", where, **content)
    error = answer.json()["error"]
    assert answer.status_code == 422, answer.text
    if param is not None:
        assert (error["param"], error["message"].startswith(param)) == (param, True)
    assert not asking.server.store.session(id_).judged


async def test_a_reward_to_a_call_that_is_not_there_is_refused(asking):
    id_, _ = await asking.opened()
    said = {"reward": 1, "call": "chatcmpl-0"}
    answer = await asking.control("POST", f"/sessions/{id_}/reward", json=said)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_such_call")
    missing = await asking.control("POST", "/sessions/s-0/reward", json={"reward": 1})
    assert missing.json()["error"]["code"] == "no_such_session"


async def test_a_session_is_exported_as_a_trace_and_deleted(asking):
    id_, key = await asking.opened(task={"q": 1})
    await say(asking.client(key), [], "hi")
    await asking.control("POST", f"/sessions/{id_}/reward", json={"reward": 1})
    exported = await asking.control("GET", f"/sessions/{id_}/export")
    trace = trace_from_json(exported.json())
    assert trace == asking.server.store.trace(id_)
    assert (trace.reward, trace.task, len(trace.calls)) == (1.0, {"q": 1}, 1)
    assert (await asking.control("DELETE", f"/sessions/{id_}")).status_code == 204
    assert (await asking.control("DELETE", f"/sessions/{id_}")).status_code == 404
    with pytest.raises(Exception, match="is not valid here"):
        await say(asking.client(key), [], "hi")
    assert asking.server.store.ask("SELECT COUNT(*) FROM calls") == [(0,)]


async def test_limits_of_a_session_hold(asking):
    _, key = await asking.opened(limits={"calls": 1})
    await say(asking.client(key), [], "hi")
    with pytest.raises(Exception, match="may ask for 1"):
        await say(asking.client(key), [], "hi")
    _, key = await asking.opened(limits={"tokens": 4})
    raw = await say(asking.client(key), [], "hi")
    assert raw.parse().usage.completion_tokens <= 4


async def test_nothing_was_promoted_so_nothing_is_rolled_back(asking):
    models = (await asking.control("GET", "/models")).json()
    assert models["serving"]["version"] == 0
    assert models["candidate"] is None
    answer = await asking.control("POST", "/rollback")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "nothing_promoted")


async def test_answers_are_as_the_description_says(asking):
    described = (await asking.control("GET", "/openapi.json")).json()
    shop = await asking.application()
    id_, key = await asking.opened()
    raw = await say(asking.client(key), [], "hi")
    call = f"{raw.parse().id}-0"
    path = "/sessions/{id}"
    asked = [
        ("post", "/sessions", {"json": {"tags": ["t"]}}),
        ("get", "/sessions", {}),
        ("get", path, {}),
        ("get", f"{path}/calls", {}),
        ("post", f"{path}/reward", {"json": {"reward": 1, "call": call}}),
        ("post", f"{path}/reward", {"json": {}}),
        ("get", f"{path}/export", {}),
        ("post", f"{path}/end", {}),
        ("delete", path, {}),
        ("get", path, {}),
        ("post", "/applications", {"json": {"name": "bank"}}),
        ("get", "/applications", {}),
        ("delete", "/applications/{name}", {}),
        ("get", "/models", {}),
        ("get", "/models", {"key": shop}),
        ("get", "/models", {"key": "sk-wrong"}),
        ("post", "/rollback", {}),
    ]
    tried = set()
    for method, route, rest in asked:
        answer = await asking.control(
            method.upper(), route.format(id=id_, name="bank"), rest.pop("key", ADMIN), **rest
        )
        known = described["paths"][f"/tuner/v1{route}"][method]["responses"]
        assert str(answer.status_code) in known, (method, route, answer.status_code)
        tried.add((method, f"/tuner/v1{route}"))
        content = known[str(answer.status_code)].get("content")
        if content is not None:
            schema = content["application/json"]["schema"]
            whole = {**schema, "components": described["components"]}
            jsonschema.validate(answer.json(), whole)
        else:
            assert answer.content == b""
    routes = {
        (method, path)
        for path, methods in described["paths"].items()
        for method in methods
        if path.startswith("/tuner/v1")
    }
    assert tried == routes


async def test_health_needs_no_key_and_metrics_no_key_on_this_machine(asking, monkeypatch):
    for path in ("/healthz", "/health"):
        assert (await asking.http.get(path)).json() == {"status": "ok"}
    engine = type(asking.server.stack.engine)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "failure", property(lambda _: RuntimeError("a test")))
        assert (await asking.http.get("/healthz")).status_code == 503
    id_, key = await asking.opened()
    await say(asking.client(key), [], "hi")
    await asking.control("POST", f"/sessions/{id_}/reward", json={"reward": 1})
    text = (await asking.http.get("/metrics")).text
    for line in (
        'tuner_requests_total{path="/v1/chat/completions",status="200"} 1.0',
        'tuner_calls_total{kind="delivered"} 1.0',
        'tuner_rewards_total{to="session"} 1.0',
        'tuner_sessions{state="open"} 1.0',
        "tuner_sessions_unjudged 0.0",
        "tuner_weights_version 0.0",
    ):
        assert line in text.splitlines()
    through = {"X-Forwarded-For": "203.0.113.9"}
    assert (await asking.http.get("/metrics", headers=through)).status_code == 401
    through |= {"Authorization": f"Bearer {ADMIN}"}
    assert (await asking.http.get("/metrics", headers=through)).status_code == 200
