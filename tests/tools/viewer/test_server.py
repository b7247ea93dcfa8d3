"""The served page: only for the link's holder, in parts, and along with a run that goes on."""

import socket

import pytest
from starlette.testclient import TestClient

from tests.kit.builders import call
from tests.tools.viewer.stored import read_data, small, store_run
from tuner.errors import TunerError
from tuner.serving.serving_store import ServingStore
from tuner.tools.viewer import web as server
from tuner.tools.viewer.web import serve, viewer_app

TOKEN = "unguessable"
PATHS = (
    "",
    *(f"api/{name}" for name in ("run", "list", "position", "summary", "tasks", "runs", "compare")),
    "api/trace?file=step_000001.jsonl&offset=0",
    "api/task?file=step_000001.jsonl&offset=0",
)


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
    assert "Open the full link" in answer.text


def test_the_link_serves_the_page_and_its_data(client):
    page = client.get("")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["referrer-policy"] == "no-referrer"
    assert read_data(page.text) == {"mode": "live"}
    assert client.get("api/run").json()["rows"] == [{"step": 1, "reward/mean": 0.5}]
    (row,) = client.get("api/list").json()["rows"]
    body = client.get("api/trace", params={"file": row["file"], "offset": row["offset"]}).json()
    assert body["trace"]["reward"] == 1.0


def test_the_list_follows_the_run_and_says_when_there_is_more(run, client):
    before = client.get("api/run").json()
    assert client.get("api/list").json()["total"] == 1
    store_run(run, [small(0, 1, 0.0)])
    after = client.get("api/run").json()
    assert before["state"] != after["state"] == client.get("api/run").json()["state"]
    answer = client.get("api/list", params={"first": 1}).json()
    assert [row["rollout"] for row in answer["rows"]] == [1]
    assert (answer["first"], answer["total"], answer["all"]) == (1, 2, 2)
    assert client.get("api/list", params={"first": 2}).json()["rows"] == []


def test_a_page_that_knows_a_replaced_file_is_told_to_begin_anew(run, client):
    assert client.get("api/run").json()["generation"] == 0
    (run / "new").write_text('{"step": 7}\n')
    (run / "new").replace(run / "metrics.jsonl")
    answer = client.get("api/run", params={"from": 1, "generation": 0}).json()
    assert (answer["from"], answer["generation"], answer["rows"]) == (0, 1, [{"step": 7}])


def test_a_long_list_comes_in_parts(run, client, monkeypatch):
    monkeypatch.setattr(server, "ROWS", 2)
    store_run(run, [small(0, i, 1.0) for i in range(1, 5)])
    client.get("api/run")
    rows = []
    for first in range(0, 5, 2):
        answer = client.get("api/list", params={"first": first, "count": 100}).json()
        assert answer["total"] == 5
        rows += answer["rows"]
    assert [row["rollout"] for row in rows] == [0, 1, 2, 3, 4]


def test_reading_goes_on_at_the_next_question(run, client, monkeypatch):
    monkeypatch.setattr(server, "READING_SECONDS", 0)
    store_run(run, [small(0, i, 1.0) for i in range(1, 4)])
    lengths, more = [], True
    while more:
        more = client.get("api/run").json()["more"]
        lengths.append(client.get("api/list").json()["total"])
    assert lengths == [1, 2, 3, 4, 4]


def test_where_a_trace_is_among_those_that_are_wanted(run, client):
    store_run(run, [small(0, i, float(i)) for i in range(2, 5)])
    client.get("api/run")
    last = client.get("api/list").json()["rows"][-1]
    key = f"{last['file']}:{last['offset']}"
    query = {"order": "best", "key": key}
    assert client.get("api/position", params=query).json()["at"] == 0
    assert client.get("api/position", params={**query, "high": 2}).json()["at"] is None
    assert client.get("api/position", params={"key": key}).json()["at"] == 3
    assert client.get("api/position", params={"key": "nothing"}).json()["at"] is None


@pytest.mark.parametrize(
    "query",
    [
        "trace?file=../metrics.jsonl&offset=0",
        "trace?file=step_000001.jsonl&offset=3",
        "trace?file=step_000001.jsonl&offset=-1",
        "trace?file=step_000001.jsonl&offset=" + "9" * 18,
        "trace",
        "run?from=x",
        "list?low=x",
        "list?order=x",
        "list?run=../../elsewhere",
        "compare?with=elsewhere",
    ],
)
def test_a_wrong_question_is_answered_with_a_sentence(client, query):
    answer = client.get(f"api/{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.fixture
def runs(tmp_path):
    """A folder of two projects; `p/a` and `p/b` had a task in common, with other settings."""
    for name, reward in (("p/a", 0.0), ("p/b", 1.0), ("q/c", 0.5)):
        metrics = [{"step": 1, "reward/mean": reward}]
        made = store_run(tmp_path / name, [small(0, 0, reward)], metrics=metrics)
        (made / "config.yaml").write_text(f"name: {made.name}\nalgorithm: {{lr: {reward}}}\n")
    return tmp_path


def opened(path):
    return TestClient(viewer_app(path, TOKEN), base_url=f"http://127.0.0.1/{TOKEN}/")


def test_beside_a_run_those_of_its_folder_can_be_chosen(runs):
    client = opened(runs / "p/b")
    assert client.get("api/runs").json() == {"runs": ["a", "b"], "first": "b"}
    assert client.get("api/run").json()["rows"][0]["reward/mean"] == 1.0
    other = {"run": "a"}
    assert client.get("api/run", params=other).json()["rows"][0]["reward/mean"] == 0.0
    assert client.get("api/list", params=other).json()["rows"][0]["reward"] == 0.0
    store_run(runs / "p/later", [])
    assert client.get("api/run", params={"run": "later"}).status_code == 200


def test_in_a_folder_of_projects_the_runs_of_all_can_be_chosen(runs):
    client = opened(runs)
    assert client.get("api/runs").json() == {"runs": ["p/a", "p/b", "q/c"], "first": "p/a"}
    assert client.get("api/run", params={"run": "q/c"}).json()["run"]["name"] == "c"
    for name in ("../p/a", "/etc", "p", str(runs / "p/a")):
        assert client.get("api/run", params={"run": name}).status_code == 400


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(TunerError, match="is not a run"):
        viewer_app(tmp_path, TOKEN)


def test_runs_are_compared_by_settings_curves_and_rollouts_of_a_task(runs):
    client = opened(runs / "p/a")
    compared = client.get("api/compare", params={"with": ["a", "b"]}).json()
    assert compared["settings"] == {"algorithm.lr": [0.0, 1.0]}
    assert [(run["name"], run["rows"][0]["reward/mean"]) for run in compared["runs"]] == [
        ("a", 0.0),
        ("b", 1.0),
    ]
    client.get("api/run")
    query = {"file": "step_000001.jsonl", "offset": 0, "with": "b"}
    task = client.get("api/task", params=query).json()["runs"]
    assert {name: [row["reward"] for row in rows] for name, rows in task.items()} == {
        "a": [0.0],
        "b": [1.0],
    }


def test_a_taken_port_is_named(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TunerError, match=f"port {port} .* give another --port"):
            serve(run, port=port, announce=lambda link: None)


@pytest.fixture
def store(tmp_path):
    """Of a server with three sessions, of which the last has no task and is waiting."""
    (tmp_path / "shop").mkdir()
    store = ServingStore(tmp_path / "shop/serving.sqlite")
    for number, task in enumerate(({"question": "100% Größe?"}, {"question": "1000"}, {})):
        id_ = f"s-{number}"
        store.open(id_, key=id_.encode(), seed=number, task=task, metadata={"user": f"u{number}"})
        store.add_calls(id_, [call(f"c{number}", [1, 2], [3], [-0.5])])
    store.end("s-2")
    yield store
    store.close()


def test_sessions_are_searched_as_they_were_written(store):
    client = opened(store.path.parent)

    def found(**query):
        return [row["session"] for row in client.get("api/list", params=query).json()["rows"]]

    assert found() == ["s-0", "s-1", "s-2"]
    assert found(text="100%") == ["s-0"]
    assert found(text="größe") == found(text="Größe") == ["s-0"]
    assert found(text="U1") == ["s-1"]
    assert found(text="HO") == ["s-0", "s-1", "s-2"]  # what the model said
    assert found(text="prompt_ids") == []
    assert found(outcome="waiting for a reward") == ["s-2"]
    assert found(order="new") == ["s-2", "s-1", "s-0"]
    assert found(split="train") == found(cause="any") == found(begins="inside") == []


def test_a_damaged_session_is_listed_with_what_is_wrong(store):
    store.change("UPDATE calls SET data = '{' WHERE session = 1")
    client = opened(store.path.parent)
    first, second, third = client.get("api/list").json()["rows"]
    assert "session s-0 is damaged" in first["error"]
    assert (second["error"], third["asked"]) == (None, "hi")
    asked = {"file": first["file"], "offset": first["offset"]}
    assert "s-0 is damaged" in client.get("api/trace", params=asked).json()["error"]
    assert client.get("api/list", params={"text": "ho"}).json()["total"] == 2
