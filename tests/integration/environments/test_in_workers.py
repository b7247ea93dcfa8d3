"""Environments of libraries in workers, where a run leaves the traces that it leaves without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import verifiers.v1 as vf

from tests.areal.loop import tuned
from tests.areal.queue_agents import trajectory
from tests.environments.test_in_workers import left_by_workers
from tests.integration.environments.test_openenv import Answer, Letters, children, served
from tests.integration.environments.test_textarena import words
from tests.integration.environments.test_verifiers import cases_are_importable, environment, left
from tuner.areal import (
    Agent,
    EnvServiceAbstraction,
    GenerationHyperparameters,
    QueueWorkflow,
)
from tuner.environments import Gymnasium, Mixture, OpenEnv, ReasoningGym, Verifiers
from tuner.errors import ConfigError
from tuner.runs.environment import from_settings
from tuner.tasks.loading import import_module_or_file
from tuner.tune import prepare

__all__ = ["cases_are_importable", "left_by_workers"]
EXAMPLES = Path(__file__).parents[3] / "examples"
ARITHMETIC = {"kind": "gymnasium", "id": "Arithmetic-v0", "train_tasks": 4, "eval_tasks": 0}


class Guesses(Agent):
    """Takes its first token for the answer."""

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        await env.reset(seed=1)
        ids = prompt.data["packed_prompts"].tolist()
        gconfig = GenerationHyperparameters(max_new_tokens=2)
        await obs_queue.put((prompt.ids[0], ids, gconfig))
        act = await act_queue.get()
        _, reward, *_ = await env.step(str(act.output_ids[0][0]))
        return [trajectory(act, reward=reward)]


def arithmetic():
    """An environment that a file of the user's registers, as `tuner.imports` loads it."""
    import_module_or_file(str(EXAMPLES / "gymnasium" / "arithmetic_env.py"), setting="here")
    return from_settings(ARITHMETIC, "tuner.environment")


def of_verifiers():
    return Verifiers(environment(), train={"limit": 4})


def test_gymnasium(left_by_workers):
    assert isinstance(arithmetic(), Gymnasium)
    left_by_workers(arithmetic)


def test_an_agent_with_queues_plays_what_the_user_registers(random_model_path, tmp_path):
    assert isinstance(arithmetic(), Gymnasium)
    environment = EnvServiceAbstraction("gymnasium", {"id": "Arithmetic-v0"})
    workflow, rows = QueueWorkflow(Guesses(), environment), [{"input_ids": [40, 41]}] * 2
    result = tuned(workflow, random_model_path, tmp_path, "tuner.workers=2", rows=rows)
    assert result.outcomes == {"completed": 4}


def test_verifiers(left_by_workers):
    before = left()
    left_by_workers(of_verifiers)
    assert left() == before


def test_verifiers_with_servers_of_tools(left_by_workers, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    config = vf.resolve_env_config(
        {"agent": {"runtime": {"type": "subprocess"}}, "taskset": {"id": "vf_tools"}}
    )
    left_by_workers(lambda: vf.load_environment(config), feedback=False)  # numbers of processes


def test_a_set_of_reasoning_gym(left_by_workers):
    config = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    left_by_workers(lambda: sums(config=config))


def sums(**given):
    return ReasoningGym("chain_sum", system_prompt=None, train_tasks=4, eval_tasks=0, **given)


def test_a_game_of_textarena(left_by_workers):
    left_by_workers(words)


def test_openenv(left_by_workers):
    with served(Letters, Answer) as url:
        left_by_workers(lambda: OpenEnv(url, max_turns=2, train_tasks=4, eval_tasks=0))


SERVER = """
import sys
sys.path.insert(0, {root!r})
import uvicorn
from openenv.core.env_server import create_app
from tests.integration.environments.test_openenv import Answer, Letters, Said

app = create_app(Letters, Answer, Said, max_concurrent_envs=16)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def test_openenv_starts_a_server_for_each_worker(left_by_workers, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER.format(root=str(EXAMPLES.parent)))
    command = [sys.executable, str(script), "{port}"]
    left_by_workers(lambda: OpenEnv(command=command, max_turns=2, train_tasks=4, eval_tasks=0))
    assert not [command for command in children() if str(script) in command]


def test_a_server_at_one_place_is_not_started_by_each_worker():
    environment = OpenEnv("http://127.0.0.1:9", command=["server"])
    with pytest.raises(ConfigError, match=r"tuner\.workers is 2, and each.*remove url"):
        prepare(environment=environment, overrides=["tuner.workers=2"])


def test_a_mixture_of_them(left_by_workers):
    with served(Letters, Answer) as url:
        left_by_workers(
            lambda: Mixture(
                {
                    "arithmetic": arithmetic(),
                    "cases": of_verifiers(),
                    "letters": OpenEnv(url, max_turns=2, train_tasks=4, eval_tasks=0),
                    "sums": sums(),
                    "words": words(),
                }
            )
        )
