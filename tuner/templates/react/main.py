"""A ReAct agent of AgentScope 1.x.

    pip install 'agentscope-tuner[agentscope1]'
    python main.py [key=value ...]

Overrides take the keys of config.yaml, as in `buffer.total_steps=30`.
"""

import sys
from pathlib import Path
from typing import Any

from tuner import (
    JudgeOutput,
    TrinityChatModel,
    TunerError,
    WorkflowOutput,
    require_agentscope1,
    tune,
)
from tuner.rewards import final_answer, math_equal

try:
    require_agentscope1()  # says what to install if AgentScope 1.x is missing
except TunerError as error:
    sys.exit(f"{type(error).__name__}: {error}")

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg

CONFIG = Path(__file__).with_name("config.yaml")


async def workflow(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """Your agent on one task, a row of data/train.jsonl. A model that calls tools is given them by
    `toolkit=`; the tiny model has never seen one."""
    agent = ReActAgent(
        name="solver",
        sys_prompt="You are a helpful math problem solving agent.",
        model=model,
        formatter=OpenAIChatFormatter(),
    )
    response = await agent.reply(msg=Msg("user", task["question"], role="user"))
    return WorkflowOutput(response=response.get_text_content() or "")


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """What the answer is worth: 1 if it ends in the right number, else 0."""
    return JudgeOutput(reward=math_equal(final_answer(response), task["answer"]))


if __name__ == "__main__":
    try:
        print(tune(workflow, judge, config_path=CONFIG, overrides=sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
