"""The tutorial's agent with a tool, and a tiny model that was taught to call it."""

from pathlib import Path

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse

from tests.integration.trinity.conftest import TINY
from tuner import AlgorithmConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune

ROWS = [{"question": f"What is {a} plus 4?", "answer": str(a + 4), "a": a} for a in range(8)]
SYSTEM = "You are a helpful math problem solving agent."


def add(a: int, b: int) -> ToolResponse:
    """Add two numbers.

    Args:
        a (int): One.
        b (int): The other.
    """
    return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])


def toolkit() -> Toolkit:
    made = Toolkit()
    made.register_tool_function(add)
    return made


async def run_react_agent(task, model):
    """The workflow of examples/gsm8k/main.py, with a tool."""
    agent = ReActAgent(
        name="react_agent",
        sys_prompt=SYSTEM,
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit(),
        max_iters=2,
    )
    response = await agent.reply(msg=Msg("user", task["question"], role="user"))
    return WorkflowOutput(response=response)


async def by_length(task, response):
    """A reward that differs between any two replies, for there to be something to learn."""
    return JudgeOutput(reward=float(len(response.get_text_content() or "")))


def taught_to_call_the_tool(folder: Path) -> Path:
    """The repository's tiny model after some supervised steps on such conversations."""
    rows = [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": row["question"]},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "call",
                            "type": "function",
                            "function": {"name": "add", "arguments": {"a": row["a"], "b": 4}},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call", "content": row["answer"]},
                {"role": "assistant", "content": f"The answer is {row['answer']}."},
            ],
            "tools": toolkit().get_json_schemas(),
        }
        for row in ROWS
    ]
    result = tune(
        train_dataset=rows,
        model=TunerModelConfig(model_path=str(TINY), max_model_len=1024),
        algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=8, learning_rate=2e-3),
        project_name="taught",
        experiment_name="taught",
        overrides=[
            f"checkpoint_root_dir={folder}",
            "buffer.total_steps=80",
            "tuner.device=cpu",
        ],
    )
    return result.checkpoint
