"""The control API: who may ask what, what is answered, and that its description says so."""

import json
import re

import jsonschema
import openai
import pytest

from tests.kit.builders import call
from tests.kit.examples import grid
from tests.serving.served import ADMIN, MODEL, say, served
from tuner.gateway.requests import MAX_DEPTH
from tuner.serving.client import AsyncClient
from tuner.traces.store import TRACES, trace_from_json


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


async def test_a_role_is_served_by_its_adapter_and_others_are_told_the_roles(tmp_path):
    async with served(tmp_path, "model.adapters={solver: {}, checker: frozen}") as asking:
        id_, key = await asking.opened()
        for role in ("solver", "checker"):
            await say(asking.client(f"{key}.{role}"), [], "2+40?")
        with pytest.raises(openai.BadRequestError, match=r"model\.adapters has solver, checker"):
            await say(asking.client(key), [], "2+40?")
        assert [one.call.role for one in asking.calls(id_)] == ["solver", "checker"]


async def test_halves_of_surrogate_pairs_are_stored_as_given_and_shown_as_u_fffd(asking):
    text = "a\udc00\ud83db"
    task, metadata = {text: [text]}, {"user": {text: None}}
    async with AsyncClient(asking.root, key=ADMIN) as client:
        session = await client.open(task=task, metadata=metadata)
        await say(asking.client(session.key), [], "hi")
        (call,) = asking.calls(session.id)
        shown = await session.reward(1.0, feedback=text, call=call.call.id)
        shown = await session.reward(feedback=text)
        assert shown.feedback == "a\ufffd\ufffdb"
        assert shown.task == {shown.feedback: [shown.feedback]}
        assert (await session.info()).metadata == {"user": {shown.feedback: None}}
    stored = asking.server.store.session(session.id)
    assert (stored.task, stored.metadata, stored.feedback) == (task, metadata, text)
    exported = (await asking.control("GET", f"/sessions/{session.id}/export")).content
    assert TRACES.parse(exported) == asking.server.store.trace(session.id)
    assert TRACES.parse(exported).feedback == text
    listed = (await asking.control("GET", "/sessions")).json()["sessions"]
    assert [one["feedback"] for one in listed] == [shown.feedback]


@grid("where", ["message", "previous_response_id", "user", "metadata"], quick=2)
@pytest.mark.parametrize("own", [True, False], ids=["session", "application"])
async def test_no_text_of_a_request_is_a_failure_of_the_server(asking, where, own):
    key = (await asking.opened())[1] if own else await asking.application()
    text = "\ud83d"
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 3}
    body |= {"message": {"input": text}, "metadata": {"metadata": {"a": text}}}.get(
        where, {where: text}
    )
    answer = await asking.http.post(
        "/v1/responses", content=json.dumps(body), headers={"Authorization": f"Bearer {key}"}
    )
    assert answer.status_code == (400 if where == "previous_response_id" else 200), answer.text


async def test_an_ended_session_takes_rewards_and_no_calls(asking):
    id_, key = await asking.opened()
    await asking.control("POST", f"/sessions/{id_}/end")
    with pytest.raises(openai.ConflictError, match="open a new session") as refused:
        await say(asking.client(key), [], "hi")
    assert refused.value.response.headers["x-should-retry"] == "false"  # its client repeats a 409
    late = await asking.control("POST", f"/sessions/{id_}/reward", key, json={"reward": 0})
    assert late.json()["judged"]


async def test_an_empty_reward_is_refused_in_our_own_words(asking):
    id_, key = await asking.opened()
    refused = await asking.control("POST", f"/sessions/{id_}/reward", key, json={})
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == "give reward, feedback, or both"


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


@grid(
    "path, body, param",
    [
        ("/reward", {}, None),
        ("/reward", {"reward": "1"}, "reward"),
        ("/reward", {"reward": True}, "reward"),
        ("/reward", {"reward": 1, "score": 2}, "score"),
        ("", {"limits": {"calls": 0}}, "limits.calls"),
        ("", {"sampling": {"top_p": 2}}, "sampling.top_p"),
        ("", {"task": "text"}, "task"),
    ],
    quick=3,
)
async def test_what_cannot_be_read_is_refused_by_name(asking, path, body, param):
    id_, _ = await asking.opened()
    where = f"/sessions/{id_}{path}" if path else "/sessions"
    answer = await asking.control("POST", where, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 422, answer.text
    if param is not None:
        assert (error["param"], error["message"].startswith(param)) == (param, True)
    assert not asking.server.store.session(id_).judged


JSON = {"content-type": "application/json"}
NUMBERS = ["-1", "0", "1", "3", "1e-320", "1e-40", "1e18", "1" + "0" * 30, "1" + "0" * 5000]
NUMBERS += ["NaN", "-Infinity", "1e400", '"1"', "[1]", "true", "9223372036854775808"]


@grid("field", ["temperature", "top_p", "top_k", "max_tokens", "calls", "tokens"], quick=2)
async def test_a_sessions_numbers_are_used_or_refused_when_it_is_opened(asking, field):
    section = "limits" if field in ("calls", "tokens") else "sampling"
    opened = 0
    for number in NUMBERS:
        body = f'{{"{section}": {{"{field}": {number}}}}}'
        answer = await asking.control("POST", "/sessions", content=body, headers=JSON)
        if answer.status_code == 201:
            opened += 1
            client = asking.client(answer.json()["key"])
            asked = {"temperature": None} if section == "sampling" else {}
            most = None if field == "max_tokens" else 1
            await say(client, [], "2+40?", max_tokens=most, **asked)
        else:
            error = answer.json()["error"]
            assert answer.status_code in (400, 422)
            assert error["param"] == f"{section}.{field}"
    assert 1 <= opened <= 4


@pytest.mark.parametrize("field", ["task", "metadata"])
async def test_what_is_opened_with_a_deep_value_can_be_read_back(asking, field):
    for levels in (1, 100, MAX_DEPTH, MAX_DEPTH + 1, 240, 500, 900, 990, 100_000):
        inside = '{"a":' * (levels - 1) + "1" + "}" * (levels - 1)
        body = f'{{"{field}": {inside}}}'
        answer = await asking.control("POST", "/sessions", content=body, headers=JSON)
        if levels > MAX_DEPTH:
            assert answer.status_code == 400
            assert f"{MAX_DEPTH} levels" in answer.json()["error"]["message"]
        elif levels > 1:
            assert answer.status_code == 201
            for what in ("", "/calls", "/export"):
                path = f"/sessions/{answer.json()['id']}{what}"
                assert (await asking.control("GET", path)).status_code == 200
    assert len((await asking.control("GET", "/sessions")).json()["sessions"]) == 2


@grid("body", ['{"reward": NaN}', '{"reward": 1e999}', "{", "[]", "1"], quick=2)
async def test_a_body_that_is_not_json_is_refused(asking, body):
    id_, _ = await asking.opened()
    answer = await asking.control("POST", f"/sessions/{id_}/reward", content=body, headers=JSON)
    assert answer.status_code == 400
    assert not asking.server.store.session(id_).judged


@pytest.mark.parametrize("name", ["after", "tag", "group", "application"])
async def test_odd_texts_in_a_lists_query_find_nothing_or_are_refused(asking, name):
    await asking.opened()
    for text in ("%00", "'", "%22", "%ff", "%ed%a0%80", "s-'%20OR%201=1", "%25", "\\", "x" * 9000):
        answer = await asking.control("GET", f"/sessions?{name}={text}")
        if name == "after":
            assert (answer.status_code, answer.json()["error"]["param"]) == (422, "after")
        else:
            assert (answer.status_code, answer.json()["sessions"]) == (200, [])


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


async def test_a_damaged_row_is_named_and_no_failure_of_the_server(asking):
    """Each column of a session and of its calls, by wrong values; the other session is answered."""
    (id_, _), (other, _) = [await asking.opened(tags=["a"]) for _ in range(2)]
    asking.server.store.add_calls(id_, [call("c-1", [1, 2], [3], [-0.5])])
    store, statuses = asking.server.store, set()
    for table, row in (("sessions", f"id = '{id_}'"), ("calls", "id = 'c-1'")):
        columns = [name for _, name, *_ in store.ask(f"PRAGMA table_info({table})")]
        for column in set(columns) - {"id", "key", "number", "session"}:
            ((whole,),) = store.ask(f'SELECT "{column}" FROM {table} WHERE {row}')
            for wrong in ("{", b"\xff"):
                store.change(f'UPDATE {table} SET "{column}" = ? WHERE {row}', wrong)
                for path in ("", "?tag=a", f"/{id_}", f"/{id_}/calls", f"/{other}"):
                    answer = await asking.control("GET", f"/sessions{path}")
                    statuses.add(answer.status_code)
                    assert answer.status_code < 500, (column, path, answer.text)
                    assert answer.status_code == 200 or id_ in path
            store.change(f'UPDATE {table} SET "{column}" = ? WHERE {row}', whole)
    assert statuses == {200, 410}
