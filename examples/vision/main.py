"""Train an agent that looks closer: it zooms into an image to read what is too small.

    python examples/vision/main.py [key=value ...]

Overrides take the keys of config.yaml beside this file. `tuner run examples/vision/config.yaml`
does the same.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cards import PARTS, TOOL, Card, asked, shown, zoom

from tuner import JudgeOutput, TrinityChatModel, TunerError, TuneResult, WorkflowOutput, tune

HERE = Path(__file__).resolve().parent
TURNS = 3


def call_tool(image: Any, name: str, arguments: str) -> Any:
    """What the model gets for a call: a part of the image, or the error that it made."""
    try:
        part = json.loads(arguments)["part"]
        return [shown(zoom(image, part))] if name == "zoom" else f"error: no tool {name!r}"
    except (KeyError, TypeError, ValueError):
        return f"error: the part must be one of {', '.join(PARTS)}"


async def look(task: dict[str, Any], model: TrinityChatModel) -> WorkflowOutput:
    """Show the image and call the tool as often as the model wants, at most `TURNS` times."""
    image = Card.drawn(task["seed"]).image()
    messages: list[Any] = [asked(task["question"], image)]
    for _ in range(TURNS):
        completion = await model.client.chat.completions.create(
            model=model.model_name, messages=messages, tools=[TOOL]
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = call_tool(image, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return WorkflowOutput(response=message.content or "", metrics={"turns": len(messages) // 2})


def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """1.0 if the last word of the reply is the answer, else 0.0."""
    return JudgeOutput(reward=float(re.findall(r"\w+", response)[-1:] == [task["answer"]]))


def main(argv: Sequence[str]) -> TuneResult:
    """Train it, and ask the held-out questions before and after."""
    return tune(look, judge, config_path=HERE / "config.yaml", overrides=argv)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
