"""OpenEnv's own server and client: episodes, tools, seeds, sessions, and what goes wrong."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import openai
import psutil
import pytest
import uvicorn
from fastmcp import FastMCP
from openenv.core import GenericEnvClient, MCPToolClient
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

from tests.examples.conftest import main  # noqa: F401  # a fixture
from tests.gateway import drift
from tuner import tune
from tuner.environments import OpenEnv, ToolCall, brought
from tuner.errors import ConfigError, FunctionError
from tuner.rollouts.without_framework import PlainChatModel
from tuner.runs.environment import from_settings
from tuner.traces import TraceStore

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "openenv"


class Answer(Action):
    text: str


class Move(Action):
    """Goes somewhere."""

    x: int
    y: int = 0


class Said(Observation):
    text: str = ""
    seed: int | None = None


class Letters(Environment):
    """Wants "42"; says what it was reset with."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    tries = 3
    resets: list = []  # noqa: RUF012  # shared on purpose
    closed: list = []  # noqa: RUF012

    def reset(self, seed=None, episode_id=None, word="", **kwargs):
        self.count = 0
        self.resets.append((seed, episode_id, word))
        return Said(text=f"{word or 'Guess'}!")

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        if action.text == "raise":
            raise ValueError("the dice are lost")
        if action.text == "hang":
            HANG.wait()
        right = action.text == "42"
        reward = None if action.text == "silence" else float(right)
        return Said(text="no", reward=reward, done=right or self.count == self.tries)

    @property
    def state(self):
        return State()

    def close(self):
        self.closed.append(self)


class Board(Letters):
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Said(text="Go.", seed=seed)

    def step(self, action, timeout_s=None, **kwargs):
        done = action.x == 2
        return Said(text=f"at {action.x}, {action.y}", seed=7, reward=0.25, done=done)


class Calculator(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    words = bare = False

    def __init__(self):
        server = FastMCP("calculator")

        @server.tool()
        def add(a: int, b: int):
            """Adds."""
            if self.words:
                return f"It is {a + b}."
            return a + b

        super().__init__(FastMCP("bare") if self.bare else server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise AssertionError("it has tools, and no other actions")

    def step(self, action, timeout_s=None, **kwargs):
        found = super().step(action, timeout_s=timeout_s, **kwargs)
        return self._rewarded(found)

    async def step_async(self, action, timeout_s=None, **kwargs):
        found = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        return self._rewarded(found)

    @staticmethod
    def _rewarded(found):
        if isinstance(found, CallToolObservation):
            found.reward = 1.0
        return found

    @property
    def state(self):
        return State()


HANG = threading.Event()


@contextlib.contextmanager
def served(environment, action, observation=Said, sessions=32):
    """A server of OpenEnv's in a thread; its URL."""
    app = create_app(environment, action, observation, max_concurrent_envs=sessions)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        HANG.set()
        server.should_exit = True
        thread.join(20)
        listening.close()
        HANG.clear()


@pytest.fixture(scope="module")
def letters_url():
    with served(Letters, Answer) as url:
        yield url


@contextlib.asynccontextmanager
async def model_saying(*texts):
    gateway = drift.gateway_of(*map(drift.letters, texts))
    try:
        yield PlainChatModel(gateway.open_session("train-1-0-0-1"))
    finally:
        await gateway.aclose()


async def output_of(environment, task, *texts):
    async with model_saying(*texts) as model:
        output = await environment.workflow(task, model)
        return output, [*model.session.calls]


def trained_on(environment, tmp_path, *more, rows=4):
    return tune(
        environment=environment,
        train_dataset=[{"seed": i} for i in range(rows)] if rows else None,
        overrides=[
            f"checkpoint_root_dir={tmp_path}",
            "project=p",
            "name=n",
            f"model.model_path={ROOT / 'models' / 'tiny_math'}",
            "model.max_model_len=256",
            "model.max_response_tokens=8",
            "buffer.batch_size=2",
            "algorithm.repeat_times=2",
            "explorer.max_retry_times=0",
            *more,
        ],
    )


def outcomes_in(tmp_path, step):
    return Counter(
        trace.outcome.value
        for trace in TraceStore(tmp_path / "p" / "n" / "traces").read("train", step)
    )


# Episodes


async def test_an_answer_is_an_action_and_an_observation_the_next_message(letters_url):
    environment = OpenEnv(letters_url, system_prompt="Be brief.")
    output, calls = await output_of(environment, {"seed": 3, "word": "Hello"}, "40", "41", "42")
    assert Letters.resets[-1] == (3, "train-1-0-0-1", "Hello")
    assert output.reward == 1.0
    assert output.response == "42"
    assert output.metrics == {"turns": 3.0, "done": 1.0, "refused_actions": 0.0, "out_of_room": 0.0}
    told = [(one["role"], one["content"]) for one in calls[-1].messages]
    assert told == [
        ("system", "Be brief."),
        ("user", "Hello!"),
        ("assistant", "40"),
        ("user", "no"),
        ("assistant", "41"),
        ("user", "no"),
    ]
    assert calls[-1].reused_ids  # goes on from the tokens that were sampled
    assert [call.state for call in calls] == ["Hello!", "no", "no"]


@pytest.mark.parametrize(("reward", "expected"), [("sum", 1.5), ("last", 1.0)])
async def test_rewards_of_steps_are_added_or_the_last_counts(reward, expected, letters_url):
    class Rising(Letters):
        def step(self, action, timeout_s=None, **kwargs):
            self.count += 1
            return Said(text="on", reward=self.count / 2, done=self.count == 2)

    with served(Rising, Answer) as url:
        output, _ = await output_of(OpenEnv(url, reward=reward), {}, "a")
    assert output.reward == expected


async def test_steps_without_a_reward_are_no_reward_of_zero(letters_url):
    output, _ = await output_of(OpenEnv(letters_url), {}, "silence")
    assert output.reward is None
    output, _ = await output_of(OpenEnv(letters_url, unrewarded=-1.0), {}, "silence")
    assert output.reward == -1.0


async def test_an_episode_ends_after_so_many_turns(letters_url):
    output, calls = await output_of(OpenEnv(letters_url, max_turns=2), {}, "40")
    assert len(calls) == 2
    assert output.metrics["done"] == 0.0


async def test_an_episode_that_outgrows_the_context_ends_with_its_rewards(letters_url):
    _, calls = await output_of(OpenEnv(letters_url), {}, "40")
    gateway = drift.gateway_of(drift.letters("40"))
    gateway.engine.max_model_len = len(calls[1].prompt_ids) + 4  # and not the third
    model = PlainChatModel(gateway.open_session("train-1-0-0-1"))
    output = await OpenEnv(letters_url).workflow({}, model)
    assert (output.reward, output.metrics["turns"]) == (0.0, 2.0)
    assert (output.metrics["out_of_room"], output.metrics["done"]) == (1.0, 0.0)
    gateway.engine.max_model_len = 8  # there is not even room for the first
    model = PlainChatModel(gateway.open_session("train-1-0-0-2"))
    with pytest.raises(openai.BadRequestError):
        await OpenEnv(letters_url).workflow({}, model)
    await gateway.aclose()


async def test_an_action_of_several_fields_is_a_call_of_a_tool():
    def call(**arguments):
        made = json.dumps({"name": "act", "arguments": arguments})
        return f"<tool_call>\n{made}\n</tool_call>"

    with served(Board, Move) as url:
        output, calls = await output_of(
            OpenEnv(url), {"seed": 5}, call(x="no"), drift.CALL, call(x=1), call(x=2, y=3)
        )
    (tool,) = calls[0].tools
    assert tool["function"]["name"] == "act"
    assert list(tool["function"]["parameters"]["properties"]) == ["x", "y"]
    assert calls[0].messages[-1]["content"] == '{"text": "Go.", "seed": 5}'
    told = [one["content"] for one in calls[-1].messages if one["role"] == "tool"]
    assert told == [
        "no valid action; it has the fields x, y",
        "no such tool; there is act",
        '{"text": "at 1, 0", "seed": 7}',
    ]
    assert output.reward == 0.5
    assert output.metrics == {"turns": 4.0, "done": 1.0, "refused_actions": 2.0, "out_of_room": 0.0}


@pytest.mark.parametrize("client", [None, MCPToolClient])
async def test_the_environments_own_tools_are_offered_and_called(client):
    with served(Calculator, CallToolAction, CallToolObservation) as url:
        environment = OpenEnv(url, client=client)
        output, calls = await output_of(environment, {"prompt": "2+40?"}, drift.CALL, "It is 42.")
    (tool,) = calls[0].tools
    assert tool["function"]["name"] == "add"
    assert tool["function"]["description"] == "Adds."
    assert calls[0].messages == [{"role": "user", "content": "2+40?"}]
    assert calls[1].messages[-1]["content"] == "42"
    assert output.response == "It is 42."
    assert output.reward == 1.0


async def test_a_tool_that_says_something_is_heard_and_none_at_all_is_an_error():
    class Words(Calculator):
        words = True

    class Bare(Calculator):
        bare = True

    with served(Words, CallToolAction, CallToolObservation) as url:
        _, calls = await output_of(OpenEnv(url), {"prompt": "2+40?"}, drift.CALL, "42")
    assert calls[1].messages[-1]["content"] == "It is 42."
    with (
        served(Bare, CallToolAction, CallToolObservation) as url,
        pytest.raises(RuntimeError, match="lists no tool"),
    ):
        await output_of(OpenEnv(url), {"prompt": "2+40?"}, "42")


async def test_what_the_user_makes_of_observations_and_answers(letters_url):
    seen = []

    def action_of(said):
        seen.append(said)
        return {"text": "42"}

    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    environment = OpenEnv(
        letters_url,
        message_of=lambda observation: f"<{observation['text']}>",
        action_of=action_of,
        tools=[tool],
    )
    _, calls = await output_of(environment, {}, drift.CALL)
    assert calls[0].messages == [{"role": "user", "content": "<Guess!>"}]
    assert seen == [ToolCall("add", {"a": 2, "b": 40})]


async def test_a_client_with_classes_of_its_own_needs_to_be_told_actions(letters_url):
    class LettersClient(EnvClient):
        def _step_payload(self, action):
            return {"text": action.text}

        def _parse_result(self, payload):
            return StepResult(Said(**payload["observation"]), payload["reward"], payload["done"])

        def _parse_state(self, payload):
            return State(**payload)

    with pytest.raises(ConfigError, match=r"LettersClient.*give action_of"):
        OpenEnv(letters_url, client=LettersClient)
    for environment in (
        OpenEnv(letters_url, client=LettersClient, action_of=lambda said: Answer(text=said)),
        OpenEnv(
            client=lambda: LettersClient(base_url=letters_url),
            action_of=lambda said: Answer(text=said),
        ),
    ):
        output, calls = await output_of(environment, {}, "42")
        assert output.reward == 1.0
        assert calls[0].messages == [{"role": "user", "content": "Guess!"}]


async def test_a_client_is_brought_as_its_server(letters_url):
    environment = brought(GenericEnvClient(base_url=letters_url))
    output, _ = await output_of(environment, {}, "42")
    assert output.reward == 1.0


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ConfigError, match="OpenEnv has no server: give url"):
        OpenEnv()
    with pytest.raises(ConfigError, match="reward is 'mean'"):
        OpenEnv("http://127.0.0.1:9", reward="mean")
    with pytest.raises(ConfigError, match=r"put \{port\} into it, or give url"):
        OpenEnv(command=["python", "server.py"])


async def test_nothing_to_tell_the_model_is_an_error_of_the_function():
    class Silent(Letters):
        def reset(self, seed=None, episode_id=None, **kwargs):
            return Said()

    with (
        served(Silent, Answer) as url,
        pytest.raises(FunctionError, match="first observation is empty"),
    ):
        await output_of(OpenEnv(url, message_of=lambda observation: ""), {}, "42")


# What goes wrong


async def test_an_environment_that_raises_says_so(letters_url):
    with pytest.raises(RuntimeError, match="the dice are lost"):
        await output_of(OpenEnv(letters_url), {}, "raise")


async def test_a_step_that_takes_too_long_is_left(letters_url):
    with pytest.raises(TimeoutError, match=r"did not answer a step within 0\.2 s"):
        await output_of(OpenEnv(letters_url, step_timeout=0.2), {}, "hang")


async def test_a_server_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(ConnectionError, match=str(port)):
        await output_of(OpenEnv(f"http://127.0.0.1:{port}"), {}, "42")


def test_rollouts_wait_for_a_session_of_a_server_that_has_few(tmp_path):
    with served(Letters, Answer, sessions=1) as url:
        environment = OpenEnv(url, eval_tasks=0)
        result = trained_on(environment, tmp_path, "buffer.total_steps=1", "buffer.batch_size=4")
    assert result.outcomes == {"completed": 8}


async def test_a_server_that_others_fill_is_not_waited_for_for_ever():
    with served(Letters, Answer, sessions=1) as url:
        async with GenericEnvClient(base_url=url) as other:
            await other.reset()
            with pytest.raises(ConnectionError, match="has no free session"):
                await output_of(OpenEnv(url, connect_timeout=0.3), {}, "42")


def test_an_environment_that_fails_is_an_outcome_and_training_goes_on(tmp_path):
    class Moody(Letters):
        def reset(self, seed=None, episode_id=None, **kwargs):
            self.seed = seed
            return super().reset(seed, episode_id, **kwargs)

        def step(self, action, timeout_s=None, **kwargs):
            if self.seed == 1:
                raise ValueError("the dice are lost")
            return Said(text="no", reward=float(len(action.text)), done=True)

    before = len(Letters.closed)
    with served(Moody, Answer) as url:
        result = trained_on(OpenEnv(url, eval_tasks=0), tmp_path, "buffer.total_steps=2")
        until = time.monotonic() + 30
        while len(Letters.closed) - before < 8 and time.monotonic() < until:
            threading.Event().wait(0.01)  # the server notices a little later
        assert len(Letters.closed) - before == 8  # a session ends with its rollout
    assert result.outcomes == {"completed": 6, "workflow_error": 2}
    assert result.steps == 2
    errors = {
        trace.error
        for trace in TraceStore(tmp_path / "p" / "n" / "traces").read("train", 1)
        if trace.error
    }
    assert errors == {"RuntimeError: Server error: the dice are lost (code: EXECUTION_ERROR)"}


SERVER = """
import os, sys
sys.path.insert(0, {root!r})
import uvicorn
from openenv.core.env_server import create_app
from tests.integration.environments.test_openenv import Answer, Letters, Said

class Mortal(Letters):
    def step(self, action, timeout_s=None, **kwargs):
        if self.seed == 1 and not os.path.exists({marker!r}):
            open({marker!r}, "w").close()
            os.kill(os.getpid(), 9)
        return Said(text="no", reward=float(len(action.text)), done=True)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.seed = seed
        return super().reset(seed, episode_id, **kwargs)

app = create_app(Mortal, Answer, Said, max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def test_a_server_that_dies_is_started_again_and_nothing_is_left_running(tmp_path):
    script, marker = tmp_path / "server.py", tmp_path / "died"
    script.write_text(SERVER.format(root=str(ROOT), marker=str(marker)))
    environment = OpenEnv(command=["python", str(script), "{port}"], eval_tasks=0)
    result = trained_on(environment, tmp_path, "buffer.total_steps=4")
    assert marker.exists()
    assert result.steps >= 3
    assert 1 <= result.outcomes["workflow_error"] <= 4  # those who were there
    assert result.outcomes["completed"] + result.outcomes["workflow_error"] == 16
    assert [outcomes_in(tmp_path, step) for step in (2, 3, 4)] == [{"completed": 4}] * 3
    error = next(
        trace.error
        for trace in TraceStore(tmp_path / "p" / "n" / "traces").read("train", 1)
        if trace.error
    )
    assert "went away at a step" in error
    assert children() == []


def children():
    return [one.cmdline() for one in psutil.Process().children(recursive=True) if one.is_running()]


async def test_a_command_that_fails_says_its_last_words(tmp_path):
    environment = OpenEnv(command=["python", "-c", "raise SystemExit('no dice')", "{port}"])
    with pytest.raises(ConnectionError, match="ended with 1: no dice"):
        await output_of(environment, {}, "42")
    await environment.close()
    assert children() == []


async def test_a_server_is_ended_with_its_children(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(
        "import http.server, subprocess, sys\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), "
        "http.server.SimpleHTTPRequestHandler).serve_forever()\n"
    )
    environment = OpenEnv(command=[sys.executable, str(script), "{port}"])
    with pytest.raises(ConnectionError):  # it is no OpenEnv server
        await output_of(environment, {}, "42")
    process = next(one for one in psutil.Process().children() if str(script) in one.cmdline())
    below = process.children(recursive=True)
    assert ["sleep", "600"] in [one.cmdline() for one in below]
    os.kill(process.pid, signal.SIGSTOP)  # nor does it listen to SIGTERM
    await environment.close()
    assert not process.is_running()
    assert psutil.wait_procs(below, timeout=20)[1] == []


def test_a_server_ends_with_the_process_that_started_it_however_that_ended(tmp_path):
    script = tmp_path / "starts.py"
    script.write_text(
        "import os, signal, subprocess, sys\n"
        "from tuner.environments.server_process import ServerProcess\n"
        "server = ServerProcess([sys.executable, '-m', 'http.server', '{port}'])\n"
        "server.address()\n"
        "print(server._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    left = [one for one in psutil.process_iter() if _group(one) == int(done.stdout)]
    assert psutil.wait_procs(left, timeout=20)[1] == []


def _group(process):
    with contextlib.suppress(OSError):
        return os.getpgid(process.pid)


# Training


def test_the_example_learns(main, tmp_path):  # noqa: F811
    result = main.main([f"checkpoint_root_dir={tmp_path}", "buffer.total_steps=5"])
    before, after = result.eval_before["eval"], result.eval_after["eval"]
    assert after > before + 0.2, (before, after)
    assert set(result.outcomes) == {"completed"}
    assert children() == []


async def test_a_file_names_it(letters_url):
    given = {"kind": "openenv", "url": letters_url, "max_turns": 2, "message_of": "json:dumps"}
    output, calls = await output_of(from_settings(given, "tuner.environment"), {"seed": 1}, "40")
    assert output.metrics["turns"] == 2
    said = json.loads(calls[0].messages[0]["content"])
    assert (said["text"], said["seed"]) == ("Guess!", None)  # and metadata, in most versions


def test_seeds_are_rows_where_there_is_no_dataset():
    environment = OpenEnv("http://127.0.0.1:9", train_tasks=3, eval_tasks=2)
    assert environment.train_dataset == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert environment.eval_dataset == [{"seed": 1_000_000}, {"seed": 1_000_001}]
    assert OpenEnv("http://127.0.0.1:9", train_dataset=[{"seed": 1}]).eval_dataset is None
