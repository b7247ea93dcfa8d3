"""Agents that are not built for branches, as a workflow function each with what it is trained on.

- `multi_turn_math`: the workflow of the example; a try later is worth half.
- `search_agent`: the agent of the example as a workflow function, by the completions API.
- The hidden number of `_guess_agent`, with three tries or six.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import _guess_agent as guess
from agent_step import play

from tuner import WorkflowOutput
from tuner.rewards import f1

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
Task = dict[str, Any]
SEARCHES = 4  # calls of the search agent
FOUND = 3  # documents of a search


@dataclass(frozen=True)
class Agent:
    """What both sides train.

    Attributes:
        train, held_out: Tasks.
        settings: Of its model, and of how it answers.
    """

    workflow: Callable[..., Any]
    train: list[Task]
    held_out: list[Task]
    settings: tuple[str, ...]


def agents(folder: Path) -> dict[str, Callable[[], Agent]]:
    """Each by its name, made when it is called.

    Args:
        folder: Where the model that plays is written, once.
    """
    return {
        "multi_turn_math": multi_turn_math,
        "search_agent": search_agent,
        "hidden number, 3 turns": lambda: hidden_number(folder, 3),
        "hidden number, 6 turns": lambda: hidden_number(folder, 6),
    }


def _example(name: str, module: str) -> Any:
    sys.path.insert(0, str(EXAMPLES / name))
    return importlib.import_module(module)


def _rows(path: Path) -> list[Task]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def multi_turn_math() -> Agent:
    solve = _example("multi_turn_math", "math_agents").solve

    async def workflow(task: Task, model: Any) -> WorkflowOutput:
        found = await solve(task, model)
        return WorkflowOutput(reward=found.reward * 0.5 ** (found.metrics["tries"] - 1))

    data = EXAMPLES / "gsm8k" / "data"
    return Agent(
        workflow,
        _rows(data / "train.jsonl"),
        _rows(data / "test.jsonl")[:100],
        (
            f"model.model_path={ROOT / 'models' / 'tiny_retry'}",
            "model.max_model_len=512",
            "model.max_response_tokens=64",
            "tuner.reasoning=keep",
        ),
    )


def search_agent() -> Agent:
    texts, retrieval = _example("search_agent", "texts"), _example("search_agent", "retrieval")
    index = retrieval.BM25Index(retrieval.read_corpus(retrieval.CORPUS))

    async def workflow(task: Task, model: Any) -> WorkflowOutput:
        text = texts.PROMPT_TEMPLATE.format(question=task["question"])
        for _ in range(SEARCHES):
            completion = await model.client.completions.create(
                model=model.model_name,
                prompt=text,
                stop=list(texts.STOP),
                max_tokens=48,
            )
            said = _closed(completion.choices[0].text)
            if (answer := texts.parse_answer(said)) is not None:
                return WorkflowOutput(reward=max(f1(answer, truth) for truth in task["answer"]))
            if (query := texts.parse_search_query(said)) is None:
                break
            (hits,) = index.search([query], FOUND)
            text += said + texts.information(
                [{**document, "wikipedia_title": document["title"]} for document, _ in hits]
            )
        return WorkflowOutput(reward=0.0)

    data = EXAMPLES / "search_agent" / "data"
    return Agent(
        workflow,
        _rows(data / "train.jsonl"),
        _rows(data / "test.jsonl")[:100],
        (f"model.model_path={ROOT / 'models' / 'tiny_search'}",),
    )


def _closed(text: str) -> str:
    """What was said, with the tag that it stopped at, which an API leaves out."""
    begun = max(("search", "answer"), key=lambda tag: text.rfind(f"<{tag}>"))
    return f"{text}</{begun}>" if f"<{begun}>" in text else text


@cache
def _taught(folder: Path) -> Path:
    template = ROOT / "tests" / "gateway" / "templates" / "qwen3.jinja"
    guess.teach(folder, template.read_text(encoding="utf-8"))
    return folder


def _nearness(text: str, number: int) -> float:
    """1 for the hidden number, 0 for one that is 50 away; always answering 55 has about 0.55."""
    found = re.findall(r"\d+", text)
    return max(0.0, 1 - abs(int(found[-1][:6]) - number) / 50) if found else 0.0


def hidden_number(folder: Path, tries: int) -> Agent:
    async def workflow(task: Task, model: Any) -> WorkflowOutput:
        found = await play(task, model)
        return WorkflowOutput(reward=_nearness(str(found.response), task["number"]))

    return Agent(
        workflow,
        guess.tasks(2000, tries),
        guess.tasks(60, tries, seed=1),
        (f"model.model_path={_taught(folder)}", "model.max_response_tokens=96"),
    )
