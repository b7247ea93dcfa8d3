"""Train a ReAct agent to solve grade-school math problems: the tutorial's complete example.

    python examples/gsm8k/main.py [key=value ...]

Overrides take the keys of config.yaml, as in `buffer.total_steps=10`. With
TUNER_MODEL_PATH=Qwen/Qwen3-1.7B and TUNER_DATASET=openai/gsm8k it is the real GSM8K, on a GPU.
"""

import os
import sys
from pathlib import Path
from typing import Any

from tuner import (
    Dataset,
    JudgeOutput,
    TrinityChatModel,
    TunerError,
    WorkflowOutput,
    require_agentscope1,
    tune,
)

require_agentscope1()  # says what to install if AgentScope 1.x is missing

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg

from tuner.rewards import final_answer, math_equal

HERE = Path(__file__).resolve().parent


async def run_react_agent(
    task: dict[str, Any],
    model: TrinityChatModel,
    auxiliary_models: dict[str, TrinityChatModel],
) -> WorkflowOutput:
    """Run the agent on one problem."""
    agent = ReActAgent(
        name="react_agent",
        sys_prompt="You are a helpful math problem solving agent.",
        model=model,  # directly use the trainable model here
        formatter=OpenAIChatFormatter(),
    )

    response = await agent.reply(
        msg=Msg("user", task["question"], role="user"),  # extract question from task
    )

    return WorkflowOutput(
        response=response,
    )


async def judge_function(
    task: dict[str, Any], response: Msg, auxiliary_models: dict[str, TrinityChatModel]
) -> JudgeOutput:
    """1.0 if the reply ends in the right number, else 0.0."""
    truth = final_answer(task["answer"])
    # A reply of only reasoning or tool calls has no text.
    answer = final_answer(response.get_text_content() or "")
    return JudgeOutput(reward=math_equal(answer, truth))


def main() -> None:
    path = os.environ.get("TUNER_DATASET", str(HERE / "data"))
    train_dataset = Dataset(path=path, split="train")
    train_dataset.preview(n=2)
    result = tune(
        workflow_func=run_react_agent,
        judge_func=judge_function,
        train_dataset=train_dataset,
        eval_dataset=Dataset(path=path, split="test"),
        config_path=HERE.parent.parent / "config.yaml",
        overrides=sys.argv[1:],
    )
    print(result)


if __name__ == "__main__":
    try:
        main()
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
