"""The agent of main.py, written with the OpenAI client instead of an agent framework.

python main_openai.py [key=value ...]
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tuner import JudgeOutput, TrinityChatModel, TunerError, WorkflowOutput, tune

CONFIG = Path(__file__).with_name("config.yaml")
SYSTEM = "You answer arithmetic questions with the calculate tool."
# The worked examples of every conversation; the tasks have more and longer numbers.
EXAMPLES = {"23 + 48 - 15": "56", "90 - 36 + 25": "79", "12 + 64 + 98": "174"}
TURNS = 3
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute a sum.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Whole numbers with + or - between them.",
                }
            },
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> str:
    """The value of a sum, or what is wrong with it."""
    if not re.fullmatch(r"\d+( ?[+-] ?\d+)*", expression):
        return f"error: {expression!r} is not a sum of whole numbers"
    return str(sum(map(int, re.findall(r"[+-]?\d+", expression.replace(" ", "")))))


def call_tool(name: str, arguments: str) -> str:
    """What the model reads after a call; its mistakes are told to it."""
    try:
        given = json.loads(arguments)
        return calculate(given["expression"]) if name == "calculate" else f"error: no tool {name!r}"
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def worked_examples() -> list[dict[str, Any]]:
    """Conversations in which the agent called the tool and answered with its result."""
    messages: list[dict[str, Any]] = []
    for expression, result in EXAMPLES.items():
        id_ = f"call_{len(messages)}"
        arguments = json.dumps({"expression": expression})
        call = {
            "id": id_,
            "type": "function",
            "function": {"name": "calculate", "arguments": arguments},
        }
        messages += [
            {"role": "user", "content": f"What is {expression}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id_, "content": result},
            {"role": "assistant", "content": f"The answer is {result}."},
        ]
    return messages


async def run_agent(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """Ask the model, call the tool as often as it wants, at most `TURNS` times."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        *worked_examples(),
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(TURNS):
        completion = await model.client.chat.completions.create(
            model=model.model_name, messages=messages, tools=[TOOL]
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = call_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return WorkflowOutput(response=message.content or "")


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """1.0 if the last number of the reply is the answer, else 0.0."""
    return JudgeOutput(reward=float(re.findall(r"-?\d+", response)[-1:] == [task["answer"]]))


if __name__ == "__main__":
    overrides = ["name=openai", *sys.argv[1:]]
    try:
        print(tune(run_agent, judge, config_path=CONFIG, overrides=overrides))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
