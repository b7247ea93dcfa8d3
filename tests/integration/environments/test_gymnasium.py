"""gymnasium itself: its environments played by a model that writes text."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Text
from typer.testing import CliRunner

from tests.environments.training import trained
from tests.examples.conftest import main
from tuner import WorkflowOutput, tune
from tuner.cli import app
from tuner.environments import Gymnasium
from tuner.errors import ConfigError
from tuner.runs.environment import brought

__all__ = ["main"]
EXAMPLE = Path(__file__).parents[3] / "examples" / "gymnasium"


class Talk(gymnasium.Env):
    """Takes any text, for `rounds`; or does what it is told to."""

    observation_space = Text(100)
    action_space = Text(8)  # which nobody keeps to
    made, closed = 0, 0

    def __init__(self, rounds=2, breaks=None):
        type(self).made += 1
        self.rounds, self.breaks, self.left = rounds, breaks, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.options, self.left = options, self.rounds
        self.breaks_now = self.breaks if seed % 2 else None
        if self.breaks_now == "reset":
            raise OSError("no board")
        return f"hello {seed} {options}", {}

    def step(self, action):
        self.left -= 1
        if self.breaks_now == "step":
            raise ValueError("the piece fell")
        if self.breaks_now == "answer":
            return "only an observation"
        if self.breaks_now == "hangs":
            threading.Event().wait(20)
        if self.breaks_now == "nan":
            return "", float("nan"), True, False, {}
        return "go on", len(action) % 5, not self.left, False, {"left": self.left}

    def close(self):
        type(self).closed += 1


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    monkeypatch.setattr(Talk, "made", 0)
    monkeypatch.setattr(Talk, "closed", 0)


@pytest.fixture
def train(random_model_path, tmp_path):
    def train(environment, *overrides, **given):
        environment.eval_dataset = None
        return trained(
            environment, random_model_path, tmp_path, "buffer.batch_size=2", *overrides, **given
        )

    return train


def test_the_example_raises_the_held_out_reward(main, tmp_path):
    result = main.main([f"checkpoint_root_dir={tmp_path}"])
    assert result.eval_after["eval"] > result.eval_before["eval"] + 0.2


def test_the_example_runs_from_its_file_alone(tmp_path, monkeypatch):
    for name in ("arithmetic_env",):
        sys.modules.pop(name, None)
    asked = ["buffer.total_steps=1", "buffer.batch_size=2", f"checkpoint_root_dir={tmp_path}"]
    result = CliRunner().invoke(app, ["run", str(EXAMPLE / "config.yaml"), *asked])
    assert result.exit_code == 0, f"{result.output} {result.exception}"


def test_an_episode_is_a_conversation_and_its_reward_the_sum(train):
    for trace in train(Gymnasium(Talk)):
        assert trace.outcome == "completed", trace.error
        assert len(trace.calls) == 2
        contents = [message["content"] for message in trace.calls[-1].messages]
        assert contents[0] == f"hello {trace.task['seed']} None"
        assert contents[2] == "go on"
        assert [call.state for call in trace.calls] == [contents[0], contents[2]]
        answers = [contents[1], trace.response]
        assert trace.reward == sum(len(text) % 5 for text in answers)
        assert (trace.metrics["steps"], trace.metrics["terminated"]) == (2, 1)
        assert trace.metrics["left"] == 0


def test_every_environment_that_was_made_is_closed(train):
    train(Gymnasium(Talk), "buffer.total_steps=2")
    assert 1 < Talk.made <= 5  # one for each rollout that ran beside others, used again
    assert Talk.closed == Talk.made


def test_what_was_made_of_an_id_is_made_again():
    lake = gymnasium.make("FrozenLake-v1", is_slippery=False)
    found = brought(lake)
    assert isinstance(found, Gymnasium)
    assert found._made().env.unwrapped.desc.shape == (4, 4)
    with pytest.raises(ConfigError, match="was not made from a registered id"):
        tune(environment=Talk())


def test_rows_may_have_options(train):
    rows = [{"seed": 3, "options": {"level": 1}}, {"seed": 4, "level": 2}]
    traces = train(Gymnasium(Talk), train_dataset=rows)
    shown = {trace.calls[0].messages[0]["content"] for trace in traces}
    assert shown == {"hello 3 {'level': 1}", "hello 4 {'level': 2}"}


def test_a_discrete_action_is_the_last_number(train):
    class Count(Talk):
        action_space = Discrete(5, start=10)

        def step(self, action):
            assert isinstance(action, np.integer)
            return "", float(action), True, False, {}

    environment = Gymnasium(Count, no_action=-3.0)
    assert environment._action("first 3, then 12.") == 12
    for text in ("no number", "15", "", "9" * 30):
        with pytest.raises(ValueError, match=r"number|is not in"):
            environment._action(text)
    for trace in train(environment):  # a random model writes none
        assert trace.metrics["no_action"] in (0, 1)
        if trace.metrics["no_action"]:
            assert trace.reward == -3


def test_an_agent_of_ones_own_plays(train):
    async def play(task, env, model):
        observation, _ = await env.reset(seed=task["seed"])
        messages = [{"role": "user", "content": observation}]
        await model.client.chat.completions.create(model=model.model_name, messages=messages)
        assert env.env.action_space is Talk.action_space
        _, reward, *_ = await env.step("abc")
        return WorkflowOutput(reward=reward)

    assert {trace.reward for trace in train(Gymnasium(Talk, agent=play))} == {3.0}


def test_turns_have_a_limit(train):
    for trace in train(Gymnasium(lambda: Talk(rounds=9), max_turns=3)):
        assert len(trace.calls) == 3
        assert trace.metrics["terminated"] == 0


@pytest.mark.parametrize(
    ("breaks", "outcome", "said"),
    [
        ("reset", "workflow_error", "OSError: no board"),
        ("step", "workflow_error", "ValueError: the piece fell"),
        ("answer", "workflow_error", "returned 'only an observation'; it must return"),
        ("nan", "invalid_reward", "nan"),
        ("hangs", "timeout", "no result within"),
    ],
)
def test_an_environment_that_breaks_is_an_outcome(train, breaks, outcome, said):
    environment = Gymnasium(lambda: Talk(breaks=breaks))
    limit = 4 if breaks == "hangs" else 60
    traces = train(environment, f"explorer.max_timeout={limit}")
    failed = [trace for trace in traces if trace.outcome != "completed"]
    assert failed
    assert {trace.outcome for trace in failed} == {outcome}
    assert all(said in trace.error for trace in failed), failed[0].error
    assert {trace.task["seed"] % 2 for trace in failed} == {1}
    assert len(failed) < len(traces)
    if breaks != "hangs":  # its thread is still in there
        assert Talk.closed == Talk.made


@pytest.mark.parametrize(
    ("id", "given", "said"),
    [
        ("Nowhere-v0", {}, "cannot be made"),
        ("CartPole-v1", {"make_args": {"nonsense": 1}}, "cannot be made: TypeError"),
        ("Pendulum-v1", {}, "which are not text: pass read_action"),
        ("FrozenLake-v1", {"agent": "nowhere.py:play"}, "there is no file"),
        ("FrozenLake-v1", {"agent": len}, "must be async"),
    ],
)
def test_what_cannot_be_played_is_refused(id, given, said):
    with pytest.raises(ConfigError, match=said):
        Gymnasium(id, **given)


def test_actions_may_be_read_by_a_function():
    environment = Gymnasium("Pendulum-v1", read_action=lambda text: np.array([float(text)], "f4"))
    assert isinstance(environment._space, Box)
    assert environment._action("0.5") == np.float32(0.5)
    with pytest.raises(ValueError, match="is not in"):
        environment._action("99")
