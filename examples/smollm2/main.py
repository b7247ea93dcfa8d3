"""Teach a real language model to use a tool, on a laptop's CPU.

    python main.py [key=value ...]

AgentScope's ReActAgent answers sums of four three-digit numbers. Its model, SmolLM2-135M-Instruct,
cannot add them, but it has a calculator: it learns to call it with the right expression. Overrides
take the keys of config.yaml, as in `buffer.total_steps=4`.
"""

import re
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

try:
    require_agentscope1()  # says what to install if AgentScope 1.x is missing
except TunerError as error:
    sys.exit(f"{type(error).__name__}: {error}")

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock, ToolResultBlock, ToolUseBlock
from agentscope.tool import Toolkit, ToolResponse

CONFIG = Path(__file__).with_name("config.yaml")
# The worked examples in the agent's memory; the tasks have more and longer numbers.
EXAMPLES = {"23 + 48 - 15": "56", "90 - 36 + 25": "79", "12 + 64 + 98": "174"}


def calculate(expression: str) -> ToolResponse:
    """Compute a sum.

    Args:
        expression (str): Whole numbers with + or - between them.
    """
    if re.fullmatch(r"\d+( ?[+-] ?\d+)*", expression):
        terms = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
        result = str(sum(map(int, terms)))
    else:
        result = f"error: {expression!r} is not a sum of whole numbers"
    return ToolResponse([TextBlock(type="text", text=result)])


def worked_examples() -> list[Msg]:
    """Conversations in which the agent called the tool and answered with its result."""
    messages: list[Msg] = []
    for expression, result in EXAMPLES.items():
        id_ = f"call_{len(messages)}"
        given: dict[str, object] = {"expression": expression}
        call = ToolUseBlock(type="tool_use", id=id_, name="calculate", input=given)
        output = ToolResultBlock(type="tool_result", id=id_, name="calculate", output=result)
        messages += [
            Msg("user", f"What is {expression}?", "user"),
            Msg("agent", [call], "assistant"),
            Msg("system", [output], "system"),
            Msg("agent", f"The answer is {result}.", "assistant"),
        ]
    return messages


async def run_agent(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """Run the agent on one sum."""
    toolkit = Toolkit()
    toolkit.register_tool_function(calculate)
    memory = InMemoryMemory()
    await memory.add(worked_examples())
    agent = ReActAgent(
        name="agent",
        sys_prompt="You answer arithmetic questions with the calculate tool.",
        model=model,  # the model that is trained
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        memory=memory,
        max_iters=3,
    )
    return WorkflowOutput(response=await agent(Msg("user", task["question"], "user")))


async def judge(task: dict[str, Any], response: Msg) -> JudgeOutput:
    """1.0 if the last number of the reply is the answer, else 0.0."""
    numbers = re.findall(r"-?\d+", response.get_text_content() or "")
    return JudgeOutput(reward=float(numbers[-1:] == [task["answer"]]))


if __name__ == "__main__":
    try:
        print(tune(run_agent, judge, config_path=CONFIG, overrides=sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
