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
from textarena.envs.registration import ENV_REGISTRY
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from tuner import tune
from tuner.environments import Environment, ReasoningGym, TextArena
from tuner.environments.textarena_games import Game

START = Path(__file__).parents[1] / "models" / "tiny_math"
UPDATES = 320
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
        24,
        0.5,
    ),
)


def sum_example(draw: random.Random) -> tuple[str, str]:
    """A question, and a guess or a worked answer."""
    a, b, sign = draw.randrange(10), draw.randrange(10), draw.choice("+-")
    question = f"State the final answer to the following arithmetic problem: {a} {sign} {b} ="
    if draw.random() < 0.6:
        return question, f"<answer>{draw.randrange(-9, 19)}</answer>"
    right = a + b if sign == "+" else a - b
    return question, f"{a} {sign} {b} = {right}\n<answer>{right}</answer>"


def nim_example(draw: random.Random) -> tuple[str, str]:
    """What is seen in the middle of a game, and a move at random."""
    game = Game("Nim-v0-train", ENV_REGISTRY["Nim-v0-train"], {"piles": PILES}, 2, seed=0)
    left = list(PILES)
    while True:
        pile = draw.choice([number for number, count in enumerate(left) if count])
        count = draw.randint(1, left[pile])
        left[pile] -= count
        if draw.random() < 0.4 or not any(left):
            return game.observation, f"{pile} {count}"
        game.step(f"{pile} {count}")


def teach(folder: Path) -> None:
    """Teach the tiny model the form of the answers."""
    tokenizer = AutoTokenizer.from_pretrained(START)
    model = AutoModelForCausalLM.from_pretrained(START)
    draw = random.Random(0)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = (
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0),
        torch.optim.AdamW(others, lr=2e-3, weight_decay=0.0),
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda update: min(1.0, 2 * (1 - update / UPDATES)))
        for one in optimizers
    ]
    for update in range(UPDATES):
        made, count = (nim_example, 8) if update % 4 == 0 else (sum_example, 40)
        rows = []
        for prompt, answer in (made(draw) for _ in range(count)):
            asked = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
            )
            before = tokenizer(asked)["input_ids"]
            ids = before + tokenizer(answer + "<|im_end|>")["input_ids"]
            rows.append(
                (torch.tensor(ids), torch.tensor([-100] * len(before) + ids[len(before) :]))
            )
        ids, labels = (
            pad_sequence(list(side), True, value)
            for side, value in zip(zip(*rows, strict=True), (0.0, -100.0), strict=True)
        )
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
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
