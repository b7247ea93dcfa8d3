"""A script for TRL's GRPOTrainer, which trains here after a change of one import.

    python examples/trl/main.py [key=value ...]

Overrides take the keys of config.yaml beside this file.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner import TunerError, TuneResult
from tuner.environments.trl import GRPOConfig, GRPOTrainer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SYSTEM = {"role": "system", "content": "You are a helpful math problem solving agent."}


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last number is the answer's."""
    return [
        float(re.findall(r"-?\d+", one[-1]["content"])[-1:] == [solution.rpartition("#### ")[2]])
        for one, solution in zip(completions, answer, strict=True)
    ]


async def formed(completions: list[Any], **columns: Any) -> list[float | None]:
    """1 where the sentence is whole; nothing is said of completions that are cut off."""
    texts = [one[-1]["content"] for one in completions]
    return [float("The answer is " in text) if text.endswith(".") else None for text in texts]


def dataset(split: str) -> list[dict[str, Any]]:
    """Conversational prompts, and a column for the reward functions."""
    lines = (ROOT / "examples/gsm8k/data" / f"{split}.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in lines.splitlines()]
    return [
        {"prompt": [SYSTEM, {"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in rows
    ]


def main(argv: Sequence[str], output_dir: str = str(HERE / "checkpoints")) -> TuneResult:
    """Train it."""
    args = GRPOConfig(
        output_dir=output_dir,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        num_generations=8,
        per_device_train_batch_size=128,
        max_completion_length=64,
        max_steps=8,
        loss_type="dapo",
        reward_weights=[1.0, 0.1],
        logging_steps=1,
    )
    trainer = GRPOTrainer(
        model=str(ROOT / "models/tiny_math"),
        reward_funcs=[right, formed],
        args=args,
        train_dataset=dataset("train"),
        eval_dataset=dataset("test")[:100],
    )
    return trainer.train(config_path=HERE / "config.yaml", overrides=argv)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except TunerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
