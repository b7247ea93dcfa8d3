"""Train a ReAct agent to solve grade-school math problems: the tutorial's complete example.

    python examples/gsm8k/main.py [key=value ...]

Overrides take the keys of config.yaml, as in `buffer.total_steps=10`. With
TUNER_MODEL_PATH=Qwen/Qwen3-1.7B and TUNER_DATASET=openai/gsm8k it is the real GSM8K, on a GPU.
"""

import logging
import os
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

# Agents print every message otherwise, thousands of them; has to be said before the import.
os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")

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

HERE = Path(__file__).resolve().parent
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")
LONGEST_EXPRESSION = 50


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
    return JudgeOutput(reward=1.0 if is_equal(truth, answer) else 0.0)


def final_answer(text: str) -> str:
    """What a solution gives as its answer: after "####", in \\boxed{}, or its last number."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if "\\boxed{" in text:
        return _in_braces(text.rpartition("\\boxed{")[2])
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else ""


def is_equal(truth: str, answer: str) -> bool:
    """Whether two answers are the same number or expression."""
    if not truth or not answer:
        return False
    numbers = _number(truth), _number(answer)
    if None not in numbers:  # nearly always, and a thousand times faster than symbolic algebra
        return numbers[0] == numbers[1]
    # Towers of powers can keep symbolic algebra busy for ever.
    if len(answer) > LONGEST_EXPRESSION or re.search(r"\^|\*\*|!", answer):
        return False
    from math_verify import parse, verify

    # Its timeouts are signals, which only the main thread can receive; it warns without them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expressions = [parse(f"${side}$", parsing_timeout=None) for side in (truth, answer)]
    return bool(verify(*expressions, timeout_seconds=None))


def _number(text: str) -> Decimal | None:
    plain = text.strip().rstrip(".").replace(",", "").replace("$", "")
    return Decimal(plain) if re.fullmatch(r"-?(?:\d+(?:\.\d+)?|\.\d+)", plain) else None


def _in_braces(text: str) -> str:
    """The text up to the brace that closes one opened before it."""
    depth = 1
    for index, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:index]
    return text


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
