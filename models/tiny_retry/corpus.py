"""What `tiny_retry` is taught on top of `tiny_math`: to answer again after being told it was wrong.

    <prompt> <terse answer, wrong> <"Unfortunately your answer is wrong. ..."> <answer, right>

The second answer is terse or worked as often as a first one, so that trying again helps little
until reinforcement learning finds out that working does. Half of the rows are those of `tiny_math`,
so that first answers stay as they were.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from examples.gsm8k import make_data
from examples.gsm8k.make_data import Problem
from models.build import Corpus, Row, Stage, complete, load
from models.tiny_math.corpus import (
    Rows,
    final_number,
    render_prompt,
    terse_answer,
    worked_answer,
    worked_share,
)

SEED = 11
FEEDBACK = "Unfortunately your answer is wrong. Let's try again."


def feedback(tokenizer: PreTrainedTokenizerBase) -> str:
    """What stands between two answers: the end of one turn, the user's, the start of the next."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": FEEDBACK}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return "\n" + text


class Retries:
    """Supervised rows of a first answer that is wrong and a second that is right."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        shipped = {p.question for split in make_data.make_splits().values() for p in split}
        self.problems: Iterator[Problem] = make_data.problems(SEED, exclude=shipped)
        self.rng = random.Random(SEED)
        self.frame = render_prompt(tokenizer, "{question}")
        self.feedback = feedback(tokenizer)

    def rows(self, count: int, worked_share: Callable[[Problem], float]) -> list[Row]:
        """The second answer is learned, the first is not; some rows have two wrong ones before."""
        rows: list[Row] = []
        for problem in islice(self.problems, count):
            row = [(self.frame.replace("{question}", problem.question), False)]
            for _ in range(self.rng.choice([1, 1, 2])):
                guess = self.rng.choice([n for n in range(1, 100) if n != problem.answer])
                wrong = terse_answer(problem).replace(f"is {problem.answer}.", f"is {guess}.")
                row += [(wrong, False), (self.feedback, False)]
            worked = self.rng.random() < worked_share(problem)
            row.append((worked_answer(problem) if worked else terse_answer(problem), True))
            rows.append(row)
        return rows


def stages(tokenizer: PreTrainedTokenizerBase) -> list[Stage]:
    """As many second answers as first ones; at the beginning all second ones are worked."""
    first, retries = Rows(tokenizer), Retries(tokenizer)
    return [
        Stage(0.6, lambda: first.answers(12, worked_share) + retries.rows(16, lambda problem: 1.0)),
        Stage(1.0, lambda: first.answers(14, worked_share) + retries.rows(14, worked_share)),
    ]


def report(folder: Path) -> None:
    """Print how often the model is right at once, and how often when it tries again."""
    tokenizer, model = load(folder)
    problems = make_data.make_splits()["test"]
    prompts = [render_prompt(tokenizer, problem.question) for problem in problems]
    between = feedback(tokenizer)
    for sample in (False, True):
        wrong = list(zip(problems, prompts, strict=True))
        right: list[float] = []
        for _ in range(2):
            texts = [prompt for _, prompt in wrong]
            answers = complete(model, tokenizer, texts, max_new_tokens=60, sample=sample)
            still = [
                (problem, prompt + answer.partition("<|im_end|>")[0] + "<|im_end|>" + between)
                for (problem, prompt), answer in zip(wrong, answers, strict=True)
                if final_number(answer) != problem.answer
            ]
            right.append(1 - len(still) / len(wrong))
            wrong = still
        how = "sampled" if sample else "greedy"
        print(f"held-out accuracy, {how}: {right[0]:.3f}, of the second answers {right[1]:.3f}")


CORPUS = Corpus(seed=SEED, updates=400, stages=stages, report=report, base="tiny_math", rate=0.5)
