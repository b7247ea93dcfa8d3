"""Sums from reasoning_gym, written as the rows that this example trains on.

    python examples/smollm2/make_data.py      # writes data/train.jsonl and data/test.jsonl

Needs `pip install reasoning-gym`; the rows are in the repository, so training does not.
"""

import json
from pathlib import Path

import reasoning_gym

TEST_SEED, TRAIN_SEED = 1, 2
TEST_SIZE, TRAIN_SIZE = 100, 1000


def rows(seed: int, size: int, exclude: set[str]) -> list[dict[str, str]]:
    """Sums and differences of four numbers with three digits.

    Args:
        seed: Of reasoning_gym's generator.
        size: How many rows.
        exclude: Expressions that may not occur; those of the rows are added.
    """
    problems = reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=2 * size, min_terms=4, max_terms=4, min_digits=3, max_digits=3
    )
    found: list[dict[str, str]] = []
    for problem in problems:
        expression = problem["metadata"]["expression"]
        if expression not in exclude and len(found) < size:
            exclude.add(expression)
            found.append({"question": f"What is {expression}?", "answer": problem["answer"]})
    return found


if __name__ == "__main__":
    seen: set[str] = set()
    folder = Path(__file__).resolve().parent / "data"
    for split, seed, size in (("test", TEST_SEED, TEST_SIZE), ("train", TRAIN_SEED, TRAIN_SIZE)):
        lines = [json.dumps(row) + "\n" for row in rows(seed, size, seen)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
