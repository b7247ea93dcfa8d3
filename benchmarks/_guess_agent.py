"""A tool-using agent for benchmarks: its task, tool and judge, and a tiny model taught to play.

The agent looks for a hidden number. It tries one number after the other with a tool that says which
way to go, until the tool allows no more, and then answers:

    user       Find the number from 10 to 99.
    assistant  I try 41. <tool_call> {"name": "try_number", "arguments": ...} </tool_call>
    tool       It is higher.
    ...
    tool       That was the last try.
    assistant  The answer is 62.

The model learned the form of this and to pick numbers at random. So every rollout has as many turns
as its task has tries, whichever trainer samples it; rollouts of a task part within a few tokens of
its prompt; and their rewards differ.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

START = Path(__file__).parents[1] / "models" / "tiny_math"
SYSTEM = "You are a helpful math problem solving agent."
# Updates, conversations of each, most tries in them, and whether the tool is described. The form is
# learned on short rows first: with the description a row is several times as long.
STAGES = ((110, 8, 2, False), (90, 4, 6, True))
MATRIX_LEARNING_RATE = 0.01  # Muon
OTHER_LEARNING_RATE = 2e-3  # AdamW: embeddings and norms


class HiddenNumber:
    """One rollout's game, in the form of an environment of TRL: `reset`, and methods as tools."""

    def reset(self, number: int, tries: int, **_: Any) -> None:
        """Hide `number`, to be found with `tries` calls of the tool."""
        self._number = number
        self._left = tries

    def try_number(self, number: int) -> str:
        """Compare a number with the hidden one.

        Args:
            number: The number to try.

        Returns:
            Where the hidden number is.
        """
        self._left -= 1
        if self._left <= 0:
            return "That was the last try."
        return "It is higher." if self._number > number else "It is lower."


TOOL: dict[str, Any] = get_json_schema(HiddenNumber.try_number)


def tasks(count: int, tries: int, seed: int = 0) -> list[dict[str, Any]]:
    """`count` games of `tries` tries."""
    draw = random.Random(seed)
    return [{"id": index, "number": draw.randint(10, 99), "tries": tries} for index in range(count)]


def prompt(task: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Find number {task['id']}: it is from 10 to 99."},
    ]


def score(text: str, number: int) -> float:
    """1 for the hidden number, less the farther away the answer is, 0 without an answer."""
    found = re.findall(r"\d+", text)
    return 1 / (1 + abs(int(found[-1][:6]) - number)) if found else 0.0


def teach(folder: Path, chat_template: str) -> None:
    """Teach the repository's tiny model to play; about a minute on two cores.

    Args:
        folder: Where model and tokenizer are written.
        chat_template: The tokenizer's from now on; one of Qwen3's form.
    """
    tokenizer = AutoTokenizer.from_pretrained(START)
    tokenizer.chat_template = chat_template
    model = AutoModelForCausalLM.from_pretrained(START)
    draw = random.Random(0)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = (
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.0),
        torch.optim.AdamW(others, lr=OTHER_LEARNING_RATE, weight_decay=0.0),
    )
    updates = [stage for stage in STAGES for _ in range(stage[0])]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: min(1.0, 2 * (1 - update / len(updates)))
        )
        for optimizer in optimizers
    ]
    model.train()
    for _, count, most_tries, described in updates:
        games = tasks(count, draw.randint(1, most_tries), seed=draw.randrange(1 << 30))
        rows = [_conversation(tokenizer, game, draw, described) for game in games]
        ids = pad_sequence([torch.tensor(ids) for ids, _ in rows], True)
        labels = pad_sequence([torch.tensor(labels) for _, labels in rows], True, -100.0)
        hidden = model.model(input_ids=ids).last_hidden_state  # (rows, length, hidden)
        learned = labels[:, 1:] != -100
        logits = model.lm_head(hidden[:, :-1][learned])  # (learned tokens, vocabulary)
        F.cross_entropy(logits, labels[:, 1:][learned]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _conversation(
    tokenizer: PreTrainedTokenizerBase, task: dict[str, Any], draw: random.Random, described: bool
) -> tuple[list[int], list[int]]:
    """Token ids of a game with random tries, and the labels: the assistant's turns."""
    task = {**task, "id": draw.randrange(1000)}
    first = tokenizer.apply_chat_template(
        prompt(task),
        tools=[TOOL] if described else None,
        add_generation_prompt=True,
        tokenize=False,
    )
    pieces = [(first, False)]
    game = HiddenNumber()
    game.reset(**task)
    for _ in range(task["tries"]):
        number = draw.randint(10, 99)
        call = json.dumps({"name": "try_number", "arguments": {"number": number}})
        said = f"I try {number}.\n<tool_call>\n{call}\n</tool_call><|im_end|>"
        heard = f"<tool_response>\n{game.try_number(number)}\n</tool_response>"
        pieces.append((said, True))
        pieces.append((f"\n<|im_start|>user\n{heard}<|im_end|>\n<|im_start|>assistant\n", False))
    pieces.append((f"The answer is {draw.randint(10, 99)}.<|im_end|>", True))
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in pieces:
        piece = tokenizer(text)["input_ids"]
        ids += piece
        labels += piece if learned else [-100] * len(piece)
    return ids, labels
