"""The served page: only for the link's holder, in parts, and along with a run that goes on."""

import socket

import pytest
from starlette.testclient import TestClient

from tests.viewer.stored import read_data, small, store_run
from tuner.errors import TunerError
from tuner.viewer import web as server
from tuner.viewer.web import serve, viewer_app

TOKEN = "unguessable"
PATHS = ("", "api/metrics", "api/traces", "api/trace?file=step_000001.jsonl&offset=0")


@pytest.fixture
def run(tmp_path):
    return store_run(tmp_path, [small(0, 0, 1.0)], metrics=[{"step": 1, "reward/mean": 0.5}])


@pytest.fixture
def client(run):
    return TestClient(viewer_app(run, TOKEN), base_url=f"http://127.0.0.1/{TOKEN}/")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", "ü"])
def test_nothing_is_served_without_the_token(run, path, token):
    answer = TestClient(viewer_app(run, TOKEN)).get(f"/{token}/{path}" if token else f"/{path}")
    assert answer.status_code == 404
    assert "Open the whole link" in answer.text


def test_the_link_serves_the_page_and_its_data(client):
    page = client.get("")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["referrer-policy"] == "no-referrer"
    assert read_data(page.text) == {"mode": "live"}
    assert client.get("api/metrics").json()["rows"] == [{"step": 1, "reward/mean": 0.5}]
    (row,) = client.get("api/traces").json()["rows"]
    body = client.get("api/trace", params={"file": row["file"], "offset": row["offset"]}).json()
    assert body["trace"]["reward"] == 1.0


def test_only_what_is_new_is_sent_while_the_run_goes_on(run, client):
    assert client.get("api/traces").json()["more"] is False
    store_run(run, [small(0, 1, 0.0)])
    answer = client.get("api/traces", params={"from": 1, "generation": 0}).json()
    assert [row["rollout"] for row in answer["rows"]] == [1]
    assert client.get("api/traces", params={"from": 2, "generation": 0}).json()["rows"] == []


def test_a_page_that_knows_a_replaced_file_is_told_to_begin_anew(run, client):
    assert client.get("api/metrics").json()["generation"] == 0
    (run / "new").write_text('{"step": 7}\n')
    (run / "new").replace(run / "metrics.jsonl")
    answer = client.get("api/metrics", params={"from": 1, "generation": 0}).json()
    assert (answer["from"], answer["generation"], answer["rows"]) == (0, 1, [{"step": 7}])


def test_a_long_list_comes_in_parts(run, client, monkeypatch):
    monkeypatch.setattr(server, "ROWS", 2)
    store_run(run, [small(0, i, 1.0) for i in range(1, 5)])
    rows, more = [], True
    while more:
        answer = client.get("api/traces", params={"from": len(rows), "generation": 0}).json()
        assert len(answer["rows"]) <= 2
        rows, more = rows + answer["rows"], answer["more"]
    assert [row["rollout"] for row in rows] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "query",
    [
        "trace?file=../metrics.jsonl&offset=0",
        "trace?file=step_000001.jsonl&offset=3",
        "trace?file=step_000001.jsonl&offset=-1",
        "trace?file=step_000001.jsonl&offset=" + "9" * 18,
        "trace",
        "traces?from=x",
    ],
)
def test_a_wrong_question_is_answered_with_a_sentence(client, query):
    answer = client.get(f"api/{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_taken_port_is_named(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TunerError, match=f"port {port} .* give another --port"):
            serve(run, port=port, announce=lambda link: None)
