"""AgentScope 1.0.21's own examples of `tune_prompt` and `select_model` run after a change of
imports. Whom they ask is here: DashScope's SDK is told so, and the reflecting model's variable."""

import json
import re
from pathlib import Path

import pytest

from tests.kit import forked
from tests.kit.chat_server import chat_server
from tests.tools.prompts.dashscope_server import dashscope_server

pytestmark = pytest.mark.long

pytest.importorskip("agentscope.model")

EXAMPLES = Path(__file__).with_name("agentscope_examples")
PROBLEMS = [{"question": f"What is {n} + 4?", "answer": f"It is so.\n#### {n + 4}"} for n in (1, 2)]

# What an example imports beside AgentScope, where it is not here.
SACREBLEU = """
from types import SimpleNamespace

def sentence_bleu(said, references):
    words = said.split()
    share = sum(word in references[0].split() for word in words) / max(len(words), 1)
    return SimpleNamespace(score=100 * share, bp=1.0, ratio=1.0)
"""
MATH_REWARD = """
from tuner.rewards import final_answer, math_equal

class MathBoxedRewardFn:
    def __call__(self, response, truth):
        return {"accuracy": math_equal(final_answer(response), truth), "format_score": 0.0}
"""


def run(folder, example, agent, **environment):
    """What an example prints that is run in this folder, with DashScope at `agent`."""
    text = (EXAMPLES / example).read_text()
    (folder / example).write_text(text.replace('"medium"', '"light"'))  # half the rollouts
    (folder / "launch.py").write_text(
        "import dashscope, os, runpy\n"
        f"dashscope.base_http_api_url = {agent.base_url!r}\n"
        f"os.environ.update({ {'DASHSCOPE_API_KEY': 'k', **environment}!r})\n"
        f"runpy.run_path({example!r}, run_name='__main__')\n"
    )
    return forked.script(folder / "launch.py")


def question(body):
    return body["input"]["messages"][-1]["content"][-1]["text"]


def system_prompt(body):
    return body["input"]["messages"][0]["content"][0]["text"]


def test_the_example_of_prompt_tuning_finds_the_better_prompt(tmp_path):
    datasets = pytest.importorskip("datasets")
    for name in ("train", "test"):
        datasets.Dataset.from_list(PROBLEMS).to_parquet(tmp_path / f"{name}.parquet")
    package = tmp_path / "trinity" / "common" / "rewards"
    package.mkdir(parents=True)
    (package / "math_reward.py").write_text(MATH_REWARD)

    def solves(body):
        added = sum(map(int, re.findall(r"\d+", question(body))))
        return rf"It is \boxed{{{added}}}" if "carefully" in system_prompt(body) else "I guess."

    with (
        dashscope_server(solves) as agent,
        chat_server(lambda body: "```\nAdd carefully.\n```") as lm,
    ):
        printed = run(tmp_path, "prompt_tuning.py", agent, DASHSCOPE_API_BASE=lm.base_url)
    assert "Optimized prompt: ('Add carefully.', {" in printed
    assert {body["model"] for body in agent.requests} == {"qwen-flash"}
    assert {body["model"] for body in lm.requests} == {"qwen3-max"}
    assert "Please solve the math problem" in system_prompt(agent.requests[0])


def test_the_example_of_model_selection_by_a_score(tmp_path):
    words = {"Guten Morgen": "good morning", "Ja": "yes"}
    rows = [{"question": german, "answer": english} for german, english in words.items()]
    (tmp_path / "translate_data").mkdir()
    (tmp_path / "translate_data" / "test.json").write_text(json.dumps(rows))
    (tmp_path / "sacrebleu.py").write_text(SACREBLEU)

    def translates(body):
        known = words if body["model"] == "deepseek-r1" else {}
        return next((known[german] for german in known if german in question(body)), "so?")

    with dashscope_server(translates) as agent:
        printed = run(tmp_path, "model_selection_bleu.py", agent)
    assert "Selected best model: deepseek-r1" in printed
    assert "'bleu_avg': 1.0" in printed
    assert len(agent.requests) == 5 * 2


def test_the_example_of_model_selection_by_tokens(tmp_path):
    folder = tmp_path / "openai" / "gsm8k" / "main"
    folder.mkdir(parents=True)
    rows = [json.dumps(row) for row in PROBLEMS * 12]
    (folder / "test.jsonl").write_text("\n".join(rows))
    words = {"qwen-turbo": 5, "qwen-plus": 9, "qwen-max": 3}
    with dashscope_server(lambda body: "word " * (words[body["model"]] - 1) + "end") as agent:
        printed = run(tmp_path, "model_selection_tokens.py", agent)
    assert "Selected best model: qwen-max" in printed
    assert "'token_consumed_avg': 13.0" in printed
    assert len(agent.requests) == 3 * 20  # total_steps
