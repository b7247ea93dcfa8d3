"""Environments whose workflow and judge run in workers."""

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.environments.test_mixture import mixture
from tests.environments.training import trained
from tests.rewards.test_sandbox import those_in
from tuner import JudgeOutput, WorkflowOutput, tune
from tuner.areal import AgentWorkflow
from tuner.environments import TRL, Environment, Mixture, Program
from tuner.errors import ConfigError
from tuner.tasks import loading
from tuner.tune import prepare

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(autouse=True)
def sent_by_value(monkeypatch):
    """As a script's functions are: a worker that imported this module would import PyTorch."""
    places = loading._places
    monkeypatch.setattr(
        loading, "_places", lambda name: () if name.startswith("tests") else places(name)
    )


class Marked(Environment):
    """Leaves a file where it was opened, and takes it away where it is closed."""

    def __init__(self, folder: Path) -> None:
        self.train_dataset = [{"question": f"{number} and 1"} for number in range(4)]
        self._folder = folder
        self._mark: Path | None = None

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        self._mark = self._folder / str(os.getpid())
        self._mark.touch()
        (self._folder / f"was-{os.getpid()}").touch()
        reply = await model.client.chat.completions.create(
            model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
        )
        return WorkflowOutput(reward=float(len(reply.choices[0].message.content or "") % 3))

    async def close(self) -> None:
        if self._mark is not None:
            self._mark.unlink()
            self._mark = None


@pytest.mark.long
def test_each_worker_closes_the_environment_that_it_played_in(random_model_path, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    result = tune(
        environment=Marked(folder),
        overrides=[
            f"model.model_path={random_model_path}",
            "tuner.workers=2",
            "buffer.batch_size=4",
            "buffer.total_steps=1",
            "algorithm.repeat_times=2",
            "model.max_response_tokens=8",
            f"checkpoint_root_dir={tmp_path}",
        ],
    )
    assert result.steps == 1
    left = sorted(file.name for file in folder.iterdir())
    assert len(left) == 2
    assert all(name.startswith("was-") and name != f"was-{os.getpid()}" for name in left)


@pytest.fixture
def left_by_workers(random_model_path, tmp_path):
    """Trains in a worker and in this process, and compares the traces."""

    def left_by_workers(make, *, feedback=True):
        found = []
        for workers in (0, 1):
            settings = (f"tuner.workers={workers}", "buffer.batch_size=4")
            name = f"run-{workers}"
            traces = trained(make(), random_model_path, tmp_path, *settings, name=name)
            assert {trace.error for trace in traces} == {None}
            found.append([of(trace, feedback) for trace in traces])
        assert len(found[0]) == 8
        assert found[0] == found[1]

    return left_by_workers


def of(trace, feedback):
    """What is the same wherever a rollout ran."""
    calls = [(call.prompt_ids, call.completion_ids, call.excluded) for call in trace.calls]
    metrics = {k: v for k, v in (trace.metrics or {}).items() if not k.endswith("seconds")}
    said = trace.feedback if feedback else None
    return trace.task, calls, trace.response, trace.reward, metrics, said


class Room:
    """What no pickle holds, with a tool and a reward."""

    def __init__(self):
        self.lock = threading.Lock()

    def reset(self, **row):
        self.word = row["word"]
        return f" {self.word}"

    def look(self) -> str:
        """Looks around."""
        return self.word

    def get_reward(self):
        return len(self.word) / 8


def brevity(completions, completion_ids, word, trainer_state, **_):
    assert trainer_state.global_step == 0
    return [len(ids) + len(one) for ids, one in zip(completion_ids, word, strict=True)]


async def first_letter(completions, environments, **_):
    """Of the messages and of environments, which reward functions get as they are."""
    said = [one[-1]["content"] for one in completions]
    return [ord(text[0]) % 7 if text else None for text in said]


@pytest.mark.long
def test_trl(left_by_workers):
    rows = [
        {"prompt": [{"role": "user", "content": "Say"}], "word": "word" * count}
        for count in range(1, 5)
    ]
    left_by_workers(lambda: TRL([brevity, first_letter], rows, environment_factory=Room))


AGENT = """
import json, os, sys, urllib.request
said = [{"role": "user", "content": sys.stdin.read()}]
body = {"model": os.environ["OPENAI_MODEL"], "messages": said}
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
asked = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + key, "content-type": "application/json"})
print(json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"] or "")
open("answer.txt", "w").write("done")
"""


async def of_files(task, response):
    assert response.files() == ["answer.txt"]
    return JudgeOutput(reward=len(response.stdout) % 5, feedback=response.diff())


@pytest.mark.long
def test_a_program(left_by_workers, monkeypatch):
    rows = [{"question": f"{number} and 1"} for number in range(4)]
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        left_by_workers(
            lambda: Program([sys.executable, "-c", AGENT], judge=of_files, train_dataset=rows)
        )
        assert not those_in(folder)
        assert os.listdir(folder) == []


class KillsItsWorker:
    """A judge that kills the process that it is called in, once."""

    def __init__(self, mark):
        self.mark = mark

    async def __call__(self, task, response):
        assert response.files() == ["answer.txt"]
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return JudgeOutput(reward=1.0)


@pytest.mark.long
def test_a_worker_that_is_killed_leaves_no_folder(random_model_path, tmp_path, monkeypatch):
    rows = [{"question": "1 and 1"}]
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        judge = KillsItsWorker(tmp_path / "killed")
        program = Program([sys.executable, "-c", AGENT], judge=judge, train_dataset=rows)
        settings = ("tuner.workers=1", "buffer.batch_size=1", "explorer.max_retry_times=2")
        found = trained(program, random_model_path, tmp_path, *settings)
        assert any("was killed by SIGKILL" in (trace.error or "") for trace in found)
        assert {trace.outcome for trace in found if trace.final} == {"completed"}
        assert not those_in(folder)
        assert os.listdir(folder) == []


@pytest.mark.long
def test_a_mixture(left_by_workers):
    left_by_workers(lambda: mixture(weights={"letters": 1, "words": 1}))


def test_a_mixture_refuses_what_one_of_its_sets_refuses():
    class Agent:
        def run(self, data): ...

    discounted = AgentWorkflow(Agent(), turn_discount=0.5)
    sets = {"words": {"workflow": discounted, "train_dataset": [{"word": "x"}]}}
    given = {"environment": Mixture(sets), "overrides": ["buffer.batch_size=1"]}
    assert prepare(**given).train_tasks
    discount = "tuner.algorithm.turn_discount=0.9"
    with pytest.raises(ConfigError, match=r"has turn_discount 0\.5, but the run also"):
        prepare(**{**given, "overrides": [*given["overrides"], discount]})
