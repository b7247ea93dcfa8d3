"""Recorded rollouts as tests of an agent: a plugin of pytest, offline and without a model.

    # conftest.py
    pytest_plugins = ["tuner.testing"]

    # test_agent.py
    async def test_refund(replayed):
        await replayed(workflow, "refund")

The agent must make the recorded requests, and gets the recorded answers; the test fails with a diff
if a request or the agent's answer differs. See `docs/testing_agents.md`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from tuner.errors import TunerError
from tuner.traces.store import SavedRollout, read_rollouts, trace_line, write_rollouts

if TYPE_CHECKING:
    from tuner.gateway import Gateway, Session
    from tuner.gateway.script import Divergence
    from tuner.tools.recorded_run import save_rollouts

__all__ = ["Replayed", "SavedRollout", "recorded_rollouts", "save_rollouts"]

logger = logging.getLogger("tuner.rollout")
_RECORDED = pytest.StashKey[list[str]]()


def __getattr__(name: str) -> Any:
    if name == "save_rollouts":  # it imports PyTorch, which tests do not need
        from tuner.tools.recorded_run import save_rollouts

        return save_rollouts
    raise AttributeError(f"module 'tuner.testing' has no attribute {name!r}")


def recorded_rollouts(path: str | Path, *names: str) -> list[Any]:
    """The rollouts of a file for `pytest.mark.parametrize`, each under its name.

    Args:
        path: The file, relative to the current folder.
        names: The rollouts, in this order; all by default.

    Raises:
        TunerError: The file is missing, is empty or has no rollout of a name.
    """
    known = read_rollouts(path)
    missing = [name for name in names if name not in known]
    if missing or not known:
        what = f"rollout {missing[0]!r}" if missing else "rollouts"
        raise TunerError(f"{Path(path).absolute()} has no {what}: {_known(known)}")
    return [pytest.param(known[name], id=name) for name in names or known]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tuner", "recorded rollouts of agents (tuner.testing)")
    group.addoption(
        "--record-rollouts",
        metavar="URL",
        help="Record rollouts that are missing with the OpenAI-compatible model at this URL.",
    )
    group.addoption("--record-model", metavar="NAME", help="The model's name there.")
    group.addoption(
        "--record-key-env",
        metavar="VARIABLE",
        help="Environment variable with its API key; without this option no key is sent.",
    )


def pytest_configure(config: pytest.Config) -> None:
    url, name = config.getoption("--record-rollouts"), config.getoption("--record-model")
    if (url is None) != (name is None):
        raise pytest.UsageError("--record-rollouts URL needs --record-model NAME, and vice versa")
    if url is not None and os.environ.get("PYTEST_XDIST_WORKER"):
        raise pytest.UsageError("--record-rollouts writes files: run it in one process, without -n")
    config.stash[_RECORDED] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash[_RECORDED]:
        terminalreporter.write_line(f"recorded {line}")


@pytest.fixture
def rollouts_file(request: pytest.FixtureRequest) -> Path:
    """The file with the rollouts of a test: `test_agent.rollouts.jsonl` next to `test_agent.py`.

    Define a fixture of this name to use another file.
    """
    return request.path.with_suffix(".rollouts.jsonl")


@pytest.fixture
def replayed(request: pytest.FixtureRequest, rollouts_file: Path) -> Replayed:
    """Runs an agent against a recorded rollout; see `tuner.testing.Replayed`."""
    option = request.config.getoption
    recorder = None
    if (url := option("--record-rollouts")) is not None:
        recorder = _Recorder(url, option("--record-model"), option("--record-key-env"))
    said = request.config.stash[_RECORDED]
    return Replayed(Path(rollouts_file), request.node.name, recorder, said)


@dataclass
class Replayed:
    """Runs an agent against a recorded rollout, and compares. The fixture `replayed` provides one.

    Args:
        path: The file with the rollouts.
        test: The test's name, the default name of its rollout.
        recorder: Records missing rollouts; None: a missing rollout fails.
        said: Gets a message for each recording.
    """

    path: Path
    test: str
    recorder: _Recorder | None = None
    said: list[str] = field(default_factory=list)

    async def __call__(
        self,
        workflow: Callable[..., Any],
        rollout: str | SavedRollout | None = None,
        *,
        task: Mapping[str, Any] | None = None,
        auxiliary_models: Mapping[str, Any] | None = None,
        seconds: float | None = 60.0,
    ) -> Any:
        """Run the agent. The test fails if a request differs from the recorded one, or the answer
        does. Other exceptions of the agent are raised here.

        Args:
            workflow: The agent, like for `tuner.tune`: `(task, model)`, async or plain, optionally
                with `auxiliary_models` and `logger`. May return anything.
            rollout: One of `recorded_rollouts`, or the name of one in the file; None: the test's.
            task: The agent's task. Required for recording; else the recorded one is used, and this
                must equal it.
            auxiliary_models: The agent's auxiliary models; they are not recorded.
            seconds: Time limit; None: no limit.

        Returns:
            The workflow's result.
        """
        name = rollout.name if isinstance(rollout, SavedRollout) else rollout or self.test
        given = _TestArguments(workflow, dict(auxiliary_models or {}), seconds)
        if isinstance(rollout, SavedRollout):
            return await _replay(rollout, task, given)
        known = read_rollouts(self.path)
        if name in known:
            return await _replay(known[name], task, given)
        if self.recorder is None:
            pytest.fail(
                f"{self.path} has no rollout {name!r}: {_known(known)}. Record it with --record-"
                "rollouts URL --record-model NAME, or save one of a run with `tuner rerun --save`",
                pytrace=False,
            )
        if task is None:
            pytest.fail(f"the rollout {name!r} is missing: pass its task to record", pytrace=False)
        saved, returned = await self.recorder.record(name, dict(task), given)
        write_rollouts(self.path, [saved])
        self.said.append(f"{name!r} in {self.path}: {len(saved.trace.calls)} calls")
        return returned


@dataclass(frozen=True)
class _TestArguments:
    """A test's arguments in addition to the rollout; fields like the arguments of `Replayed`."""

    workflow: Callable[..., Any]
    auxiliary_models: dict[str, Any]
    seconds: float | None

    async def returned(self, session: Session, task: dict[str, Any]) -> Any:
        """The workflow's result, in a session."""
        from tuner.rollouts.chat_models import chat_model, default_kind
        from tuner.tasks.functions import TaskRow, call_function

        model = chat_model(session, kind=default_kind())
        arguments = {
            "task": TaskRow(task),
            "model": model,
            "auxiliary_models": self.auxiliary_models,
            "logger": logger,
            "feedback": None,
        }
        try:
            async with asyncio.timeout(self.seconds) as deadline:
                with session.results.collecting():
                    returned = await call_function(self.workflow, arguments)
        except TimeoutError:
            if deadline.expired():
                _fail(f"the agent did not end within {self.seconds:g} s")
            raise
        if hasattr(model, "workflow_ended"):  # frameworks whose agents can stop half-way
            model.workflow_ended()
        return returned


@asynccontextmanager
async def _opened(gateway: Gateway, **options: Any) -> AsyncIterator[Session]:
    session = gateway.open_session("test", **options)
    try:
        yield session
    finally:
        session.seal()
        await gateway.aclose()


async def _replay(
    saved: SavedRollout, task: Mapping[str, Any] | None, given: _TestArguments
) -> Any:
    from tuner.gateway import SamplingDefaults
    from tuner.gateway.playback import MessageScript, Playback

    trace = saved.trace
    if task is not None and _plain(task) != _plain(trace.task):
        _fail(
            f"the rollout {saved.name!r} was recorded with another task: delete its line, and "
            f"record it again\nrecorded: {trace.task}\nnow:      {dict(task)}"
        )
    script = MessageScript(trace, context=saved.context)
    defaults = SamplingDefaults(**saved.defaults)
    async with _opened(Playback(saved.model), script=script, defaults=defaults) as session:
        error, returned = None, None
        try:
            returned = await given.returned(session, dict(trace.task))
        except Exception as raised:
            if script.divergence is None:
                raise
            error = raised
    if (divergence := script.end()) is not None:
        _fail_at(saved, divergence, error)
    _compare(saved, returned)
    return returned


def _fail_at(saved: SavedRollout, left: Divergence, error: Exception | None) -> NoReturn:
    """Fail with the difference; outside of `except`, so that pytest shows nothing else."""
    from tuner.gateway.request_diff import difference_of
    from tuner.tasks.functions import raised_in

    place = None if error is None else raised_in(error)
    lines = [f"the agent leaves the rollout {saved.name!r} {left}"]
    lines += [] if place is None else [f"asked for in {place}"]
    _fail("\n".join([*lines, *difference_of(left)]))


def _compare(saved: SavedRollout, returned: Any) -> None:
    from tuner.gateway.request_diff import difference_of_texts

    lines = difference_of_texts(saved.trace.response, _answer(returned))
    if lines:
        head = f"the agent makes the requests of {saved.name!r}, but its answer differs"
        _fail("\n".join([head, *lines]))


def _fail(text: str) -> NoReturn:
    pytest.fail(text, pytrace=False)


def _answer(returned: Any) -> str:
    """A workflow's result, in the form of its trace."""
    from tuner.tasks.functions import response_text

    if isinstance(returned, Mapping):
        return response_text(returned.get("response"))
    is_output = type(returned).__name__ == "WorkflowOutput" and hasattr(returned, "response")
    return response_text(returned.response if is_output else returned)


@dataclass(frozen=True)
class _Recorder:
    """Records rollouts of a model behind a URL.

    Attributes:
        url, model: The server, and its name of the model.
        key_env: The environment variable that holds the API key, or None.
    """

    url: str
    model: str
    key_env: str | None

    async def record(
        self, name: str, task: dict[str, Any], given: _TestArguments
    ) -> tuple[SavedRollout, Any]:
        """Record a rollout; returns it with the workflow's result."""
        from tuner.config import RemoteModel
        from tuner.gateway.relay import Relay
        from tuner.rollouts.chat_models import remote_client
        from tuner.traces import Outcome, RolloutId, Trace

        remote = RemoteModel(base_url=self.url, model_name=self.model, api_key_env=self.key_env)
        client = remote_client(remote, "--record-key-env")
        began = time.time()
        async with _opened(Relay(client, self.model)) as session:
            returned = await given.returned(session, dict(task))
            calls = session.seal()
        if not calls:
            _fail(f"the rollout {name!r} has no calls: the agent sent no request to `model`")
        trace = Trace(
            RolloutId(0, 0, 0, "recorded"),
            _plain(task),
            calls,
            Outcome.COMPLETED,
            None,
            response=_answer(returned),
            started=began,
            results=session.results.kept,
        )
        return SavedRollout(name, trace, self.model), returned


def _plain(task: Mapping[str, Any]) -> dict[str, Any]:
    """A task in the form of a file."""
    plain: dict[str, Any] = json.loads(trace_line(dict(task)))
    return plain


def _known(rollouts: Mapping[str, SavedRollout]) -> str:
    return f"it has {', '.join(map(repr, rollouts))}" if rollouts else "it is empty"
