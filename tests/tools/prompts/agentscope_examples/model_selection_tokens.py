"""AgentScope 1.0.21 (Apache-2.0), examples/tuner/model_selection/example_token_usage.py.

Its code, with our imports.
"""

import logging
import os
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import DashScopeChatModel

from tuner import DatasetConfig, WorkflowOutput, avg_token_consumption_judge, select_model

logging.basicConfig(level=logging.INFO)
models = [
    DashScopeChatModel(
        "qwen-turbo", api_key=os.environ.get("DASHSCOPE_API_KEY", ""), max_tokens=512
    ),
    DashScopeChatModel(
        "qwen-plus", api_key=os.environ.get("DASHSCOPE_API_KEY", ""), max_tokens=512
    ),
    DashScopeChatModel("qwen-max", api_key=os.environ.get("DASHSCOPE_API_KEY", ""), max_tokens=512),
]


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    agent = ReActAgent(
        name="math_solver",
        sys_prompt="You are a helpful math problem solving agent.",
        model=model,
        formatter=OpenAIChatFormatter(),
    )
    question = task.get("question", "") if isinstance(task, dict) else str(task)
    msg = Msg(name="user", content=question, role="user")
    response = await agent.reply(msg=msg)
    return WorkflowOutput(response=response)


async def main() -> None:
    dataset_config = DatasetConfig(path="openai/gsm8k", name="main", split="test", total_steps=20)
    best_model, metrics = await select_model(
        workflow_func=workflow,
        judge_func=avg_token_consumption_judge,
        train_dataset=dataset_config,
        candidate_models=models,
    )
    print(f"Selected best model: {best_model.model_name}")
    print(f"Metrics: {metrics}")


if __name__ == "__main__":
    import asyncio

    asyncio.run(main())
