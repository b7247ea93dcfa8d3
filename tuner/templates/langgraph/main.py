"""A LangGraph agent.

    pip install langchain langchain-openai
    python main.py [key=value ...]

Overrides take the keys of config.yaml, as in `buffer.total_steps=30`.
"""

import sys
from pathlib import Path
from typing import Any

try:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI
except ImportError:
    sys.exit("this agent needs LangChain: pip install langchain langchain-openai")

from tuner import JudgeOutput, TrinityChatModel, TunerError, WorkflowOutput, tune
from tuner.rewards import final_answer, math_equal

CONFIG = Path(__file__).with_name("config.yaml")


async def workflow(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """Your agent on one task, a row of data/train.jsonl. A model that calls tools is given them by
    `tools=`; the tiny model has never seen one."""
    client = model.client
    chat = ChatOpenAI(
        model=model.model_name, async_client=client.chat.completions, root_async_client=client
    )
    agent = create_agent(
        chat, tools=[], system_prompt="You are a helpful math problem solving agent."
    )
    result = await agent.ainvoke({"messages": [{"role": "user", "content": task["question"]}]})
    return WorkflowOutput(response=result["messages"][-1].text)


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """What the answer is worth: 1 if it ends in the right number, else 0."""
    return JudgeOutput(reward=math_equal(final_answer(response), task["answer"]))


if __name__ == "__main__":
    try:
        print(tune(workflow, judge, config_path=CONFIG, overrides=sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
