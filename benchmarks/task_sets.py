"""Held-out reward of a reasoning_gym set and of a TextArena game, before and after training.

Both are used by name, as in `tune(environment="reasoning_gym:chain_sum")`: sums of one digit, and
Nim against the model as it was at the start, each side in every second game. The model is the
repository's tiny one, taught for a minute to answer in the form of either: mostly guesses, at times
a worked sum, and moves at random. Held-out questions are none of the training's; a held-out game
differs in the opponent's moves. Evaluation is greedy, and the opponent samples.

    python benchmarks/task_sets.py [--seeds 3]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from _report import Row, report
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from tuner import tune
from tuner.environments import Environment, ReasoningGym, TextArena
from tuner.environments.textarena_games import Game

START = Path(__file__).parents[1] / "models" / "tiny_math"
UPDATES, EACH = 160, 16
PILES = [2, 3]
SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
# Name, environment, steps, and the least held-out reward wanted after training.
CASES: tuple[tuple[str, Callable[[], Environment], int, float], ...] = (
    (
        "reasoning_gym:chain_sum, sums of one digit",
        lambda: ReasoningGym("chain_sum", config=SUMS, system_prompt=None, train_tasks=512),
        12,
        0.8,
    ),
    (
        "textarena:Nim-v0-train, against the start",
        lambda: TextArena("Nim-v0-train", system_prompt=None, make_args={"piles": PILES}),
        16,
        0.6,
    ),
)


def example(draw: random.Random) -> tuple[str, str]:
    """A prompt of one of the two, and an answer in its form."""
    if draw.random() < 0.5:
        a, b, sign = draw.randrange(10), draw.randrange(10), draw.choice("+-")
        question = f"State the final answer to the following arithmetic problem: {a} {sign} {b} ="
        if draw.random() < 0.6:
            return question, f"<answer>{draw.randrange(-9, 19)}</answer>"
        right = a + b if sign == "+" else a - b
        return question, f"{a} {sign} {b} = {right}\n<answer>{right}</answer>"
    game: Game = TextArena(
        "Nim-v0-train", make_args={"piles": PILES}, train_tasks=0, eval_tasks=0
    )._game(2, 0)
    left = list(PILES)
    while True:
        pile = draw.choice([n for n in range(len(left)) if left[n]])
        count = draw.randint(1, left[pile])
        if draw.random() < 0.4 or sum(left) - count == 0:
            return game.observation, f"{pile} {count}"
        left[pile] -= count
        game.step(f"{pile} {count}")


def teach(folder: Path) -> None:
    """Teach the tiny model the form of the answers."""
    tokenizer = AutoTokenizer.from_pretrained(START)
    model = AutoModelForCausalLM.from_pretrained(START)
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min(1.0, 2 * (1 - update / UPDATES))
    )
    for _ in range(UPDATES):
        rows = []
        for _ in range(EACH):
            prompt, answer = example(draw)
            asked = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            ids = [tokenizer(text)["input_ids"] for text in (asked, answer + "<|im_end|>")]
            rows.append((torch.tensor(ids[0] + ids[1]), len(ids[0])))
        ids = pad_sequence([row for row, _ in rows], True)
        labels = pad_sequence([row for row, _ in rows], True, -100.0)
        for label, (_, prompt_length) in zip(labels, rows, strict=True):
            label[:prompt_length] = -100
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    print(f"taught, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(environment: Environment, model: Path, steps: int, seed: int) -> tuple[float, float]:
    """The held-out reward before and after."""
    with tempfile.TemporaryDirectory() as folder:
        result = tune(
            environment=environment,
            overrides=[
                f"model.model_path={model}",
                "model.max_model_len=1024",
                "model.max_response_tokens=24",
                "algorithm.algorithm_type=rloo",
                "algorithm.repeat_times=8",
                "algorithm.optimizer.lr=5e-4",
                "buffer.batch_size=8",
                f"buffer.total_steps={steps}",
                "explorer.runner_per_model=64",
                "explorer.eval_interval=0",
                f"tuner.seed={seed}",
                f"checkpoint_root_dir={folder}",
            ],
        )
    return result.eval_before["eval"], result.eval_after["eval"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        teach(Path(folder))
        for name, made, steps, wanted in CASES:
            began = time.monotonic()
            found = [run(made(), Path(folder), steps, seed) for seed in range(given.seeds)]
            seconds = (time.monotonic() - began) / given.seeds
            before, after = (fmean(side) for side in zip(*found, strict=True))
            print(f"{name}: {found}", flush=True)
            case = f"{name}, {steps} steps, {seconds:.0f} s"
            rows += [
                Row(f"{case}, mean of {given.seeds}", "held-out reward", after, "goal", wanted, 1),
                Row(f"{name}, before training", "held-out reward", before),
                Row(f"{name}, the worst seed", "held-out reward", min(now for _, now in found)),
            ]
    report("task_sets", rows, ["torch", "transformers", "reasoning-gym", "textarena"])


if __name__ == "__main__":
    main()
