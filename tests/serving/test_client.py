"""The clients of a server: what they send, when they send it again, and what they make of answers.

Answers are made up here, as a real server cannot be made to break off when it is told to; what a
real one answers is in `tests/examples/test_serving.py` and `tests/chaos/serving.py`.
"""

import inspect
import json
from types import SimpleNamespace

import httpx
import openai
import pytest

import tuner
from tuner import ServingError
from tuner.serving import asking
from tuner.serving import client as client_module

SESSION = {"id": "s-1", "state": "open", "opened": 1.0, "of_a_newer_server": True}
OPENED = {"id": "s-1", "key": "sk-tuner-secret", "base_url": "http://served:1/v1"}


class Answers:
    """Answers a client's requests in turn, and keeps them."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status, body = answer if isinstance(answer, tuple) else (200, answer)
        if isinstance(body, bytes):
            return httpx.Response(status, content=body)
        return httpx.Response(status, json=body)

    @property
    def asked(self):
        return [f"{request.method} {request.url.raw_path.decode()}" for request in self.requests]

    @property
    def bodies(self):
        return [json.loads(request.content or b"null") for request in self.requests]


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """Seconds that were waited for; nobody does. Only the client's: other threads sleep as ever."""
    waited = []

    async def asleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr(client_module, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setattr(client_module, "asyncio", SimpleNamespace(sleep=asleep))
    return waited


def client_of(answers, **options):
    http_client = httpx.Client(transport=httpx.MockTransport(answers))
    return tuner.Client("http://here:8700/", key="sk-admin", http_client=http_client, **options)


def async_client_of(answers, **options):
    http_client = httpx.AsyncClient(transport=httpx.MockTransport(answers))
    return tuner.AsyncClient("http://here:8700", key="sk-admin", http_client=http_client, **options)


def test_a_session_is_opened_used_and_judged():
    answers = Answers((201, OPENED), {**SESSION, "reward": 1.0, "judged": True}, SESSION)
    with client_of(answers) as client:
        session = client.open(task={"q": 1}, group="g", sampling={"temperature": 0})
        assert session.reward(True, feedback="thumb").reward == 1.0
        assert session.end().state == "open"
    assert answers.asked == [
        "POST /tuner/v1/sessions",
        "POST /tuner/v1/sessions/s-1/reward",
        "POST /tuner/v1/sessions/s-1/end",
    ]
    assert answers.bodies[0] == {"task": {"q": 1}, "group": "g", "sampling": {"temperature": 0}}
    assert answers.bodies[1] == {"reward": 1.0, "feedback": "thumb"}
    assert {request.headers["authorization"] for request in answers.requests} == {"Bearer sk-admin"}


def test_a_session_makes_clients_of_the_libraries_that_mark_their_retries():
    session = client_of(Answers(OPENED)).open()
    answers = Answers((503, {}), (503, {}), (400, {"error": {"message": "no", "code": None}}))
    client = session.openai("critic", http_client=openai.DefaultHttpxClient())
    assert client.api_key == "sk-tuner-secret.critic"
    assert str(client.base_url) == "http://served:1/v1/"
    assert str(session.anthropic().base_url) == "http://served:1"
    # Its own HTTP library may be another than httpx: what it would send is looked at instead.
    sent = []

    def send(request, **_):
        sent.append(request.headers)
        answer = answers(httpx.Request("POST", "http://x", json={}))
        library = inspect.getmodule(type(request))
        made = __import__(library.__name__.partition(".")[0]).Response
        soon = {"retry-after-ms": "1"}
        return made(answer.status_code, content=answer.content, request=request, headers=soon)

    client._client.send = send
    with pytest.raises(openai.BadRequestError):
        client.with_options(timeout=5).chat.completions.create(model="m", messages=[])
    keys = {headers["idempotency-key"] for headers in sent}
    assert len(sent) == 3
    assert len(keys) == 1


def test_opening_is_sent_again_under_the_key_of_its_first_try(pauses):
    lost = httpx.ReadError("reset")
    answers = Answers(httpx.ConnectError("refused"), lost, (502, b"<html>"), (201, OPENED))
    assert client_of(answers).open().id == "s-1"
    assert len({request.headers["idempotency-key"] for request in answers.requests}) == 1
    assert len(pauses) == 3
    assert pauses[0] < pauses[-1]


async def test_both_clients_try_again_alike(pauses):
    answers = Answers(httpx.ConnectError("refused"), (429, {}), SESSION)
    assert (await async_client_of(answers).session("s-1").info()).id == "s-1"
    assert len(pauses) == 2


def test_a_server_says_for_how_long_to_wait(pauses):
    def busy(request):
        return httpx.Response(429, headers={"retry-after": "7"})

    with pytest.raises(ServingError, match="429"):
        client_of(busy, patience=5).models()
    assert pauses == []  # 7 s are more than is left
    responses = iter([busy(None), httpx.Response(200, json=SESSION)])
    client_of(lambda request: next(responses), patience=60).session("s-1").info()
    assert pauses == [7.0]


@pytest.mark.parametrize("ask", [lambda c: c.rollback(), lambda c: c.application("a")])
def test_what_must_not_be_done_twice_is_not_sent_twice(ask):
    answers = Answers(httpx.ReadError("reset"))
    with pytest.raises(ServingError) as caught:
        ask(client_of(answers))
    assert (caught.value.status, caught.value.code) == (None, "unreachable")
    answers = Answers(httpx.ConnectError("refused"), (409, {"error": {"message": "none"}}))
    with pytest.raises(ServingError, match="none"):
        ask(client_of(answers))
    assert answers.answers == []  # what never left is sent again


def test_a_server_that_is_not_there_is_told_when_patience_ends():
    with pytest.raises(ServingError, match=r"here:8700.*is `tuner serve` running there"):
        client_of(Answers(httpx.ConnectError("refused")), patience=0).models()


def test_a_refusal_has_its_status_its_code_and_the_servers_sentence():
    error = {"message": "the key is none of ours", "code": "invalid_api_key"}
    with pytest.raises(tuner.TunerError, match="none of ours") as caught:
        client_of(Answers((401, {"error": error}))).session("s-1").info()
    told = caught.value
    assert (told.status, told.code, told.message) == (401, error["code"], error["message"])


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"id": 1}'])
def test_something_else_than_a_server_of_ours_is_told(body):
    with pytest.raises(ServingError, match="is it a server of `tuner serve`"):
        client_of(Answers((200, body))).session("s-1").info()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_is_a_finite_number(value):
    answers = Answers()
    with pytest.raises(ServingError, match="finite"):
        client_of(answers).session("s-1").reward(value)
    assert answers.requests == []


def test_pages_are_asked_for_as_they_are_taken():
    second = {**SESSION, "id": "s-2"}
    answers = Answers({"sessions": [SESSION], "next": "s-1"}, {"sessions": [second], "next": None})
    found = client_of(answers).sessions(judged=False, tag="a b")
    assert next(found).id == "s-1"
    assert len(answers.requests) == 1
    assert [session.id for session in found] == ["s-2"]
    assert answers.asked == [
        "GET /tuner/v1/sessions?judged=false&tag=a+b",
        "GET /tuner/v1/sessions?judged=false&tag=a+b&after=s-1",
    ]


async def test_pages_are_asked_for_by_both_clients_alike():
    second = {**SESSION, "id": "s-2"}
    answers = Answers({"sessions": [SESSION], "next": "s-1"}, {"sessions": [second], "next": None})
    found = async_client_of(answers).sessions(state="open", after="s-0")
    assert [session.id async for session in found] == ["s-1", "s-2"]
    assert [request.url.params["after"] for request in answers.requests] == ["s-0", "s-1"]


def test_a_sessions_key_is_that_of_who_asks_or_is_given():
    session = client_of(Answers()).session("s-1")
    assert session.key is None
    with pytest.raises(ServingError, match=r"client\.session\(id, key="):
        session.openai()
    assert client_of(Answers()).session("s-1", key="sk-tuner-a").openai().api_key == "sk-tuner-a"
    assert tuner.Client(key="sk-tuner-own").session("s-1").anthropic().api_key == "sk-tuner-own"


def test_keys_are_not_shown():
    session = client_of(Answers(OPENED)).open()
    application = client_of(Answers({"name": "a", "key": "sk-app-secret"})).application("a")
    assert "secret" not in f"{session!r} {application!r} {application}"


def test_an_id_stays_in_its_place():
    answers = Answers((204, b""))
    client_of(answers).session("../applications/a?x=#").delete()
    assert answers.asked == ["DELETE /tuner/v1/sessions/..%2Fapplications%2Fa%3Fx%3D%23"]


def test_both_clients_have_the_same():
    def public(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(tuner.Client) - {"close"} == public(tuner.AsyncClient) - {"aclose"}
    assert public(tuner.serving.ServedSession) == public(tuner.serving.AsyncServedSession)
    assert asking.SessionOptions.__annotations__.keys() == {
        *("task", "group", "metadata", "tags", "limits", "sampling")
    }
