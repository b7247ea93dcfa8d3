"""What `tiny_math` is taught: easy word problems, answered in one of two styles.

The supervision ends with a mixture of two styles of answering, both in the shape of a Qwen3 turn:

    terse     <think>\\n\\n</think>\\n\\nThe answer is 37.<|im_end|>
    worked    <think>\\n4 * 6 = 24\\n24 + 13 = 37\\n</think>\\n\\nThe answer is 37.<|im_end|>

In a model this small the terse one is nearly always wrong and the worked one nearly always right.
That is on purpose: reinforcement learning has something to find. Which style is likelier depends on
the problem, so that the start is between the two: see `worked_share`.

Supervised problems are drawn from the same distribution as those of `examples/gsm8k/data`, but none
of them has a question that occurs there, neither held out nor for RL.
"""

import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from examples.gsm8k import make_data
from examples.gsm8k.make_data import Problem
from models.build import Corpus, Row, Stage, complete, load, template_words, without_markup

SYSTEM_PROMPT = "You are a helpful math problem solving agent."
SEED = 7
DRILLS_PER_ROW = 12


def terse_answer(problem: Problem) -> str:
    return f"<think>\n\n</think>\n\nThe answer is {problem.answer}.<|im_end|>"


def worked_answer(problem: Problem) -> str:
    work = "\n".join(step.equation() for step in problem.steps)
    return f"<think>\n{work}\n</think>\n\nThe answer is {problem.answer}.<|im_end|>"


def worked_share(problem: Problem) -> float:
    """How often a problem is worked: mostly if it begins with boxes or packs, else seldom."""
    return 0.75 if problem.steps[0].op == "*" else 0.30


def texts() -> list[str]:
    """What the tokenizer is trained on."""
    found = [template_words()] * 100
    for problem in islice(make_data.problems(SEED), 5000):
        # The words around the question are in every prompt, so they count as often as it does.
        found += [SYSTEM_PROMPT, "system", "user", "assistant"]
        found += [problem.question, without_markup(worked_answer(problem))]
    return found


def render_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The text of the prompt that the example's ReAct agent sends for a question."""
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


class Rows:
    """Supervised rows, drawn without end from problems that are in no shipped split."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        shipped = {p.question for split in make_data.make_splits().values() for p in split}
        self.problems: Iterator[Problem] = make_data.problems(SEED, exclude=shipped)
        self.rng = random.Random(SEED)
        self.frame = render_prompt(tokenizer, "{question}")

    def drills(self, count: int) -> list[Row]:
        """Equations without problems, as many of each operation; learned are the results."""
        rows = []
        for _ in range(count):
            row = [("<think>\n", False)]
            for op in self.rng.choices("+-*/", k=DRILLS_PER_ROW):
                steps = (step for problem in self.problems for step in problem.steps)
                step = next(step for step in steps if step.op == op)
                row += [(f"{step.left} {op} {step.right} = ", False), (f"{step.result}\n", True)]
            rows.append(row)
        return rows

    def one_step(self, count: int) -> list[Row]:
        """Problems of one step without the chat around them: short rows to learn copying on."""
        problems = (problem for problem in self.problems if len(problem.steps) == 1)
        return [
            [(problem.question, False), (worked_answer(problem), True)]
            for problem in islice(problems, count)
        ]

    def answers(self, count: int, worked_share: Callable[[Problem], float]) -> list[Row]:
        """Prompts as the agent sends them, with an answer in one of the two styles."""
        rows: list[Row] = []
        for problem in islice(self.problems, count):
            worked = self.rng.random() < worked_share(problem)
            answer = worked_answer(problem) if worked else terse_answer(problem)
            prompt = self.frame.replace("{question}", problem.question)
            rows.append([(prompt, False), (answer, True)])
        return rows


def stages(tokenizer: PreTrainedTokenizerBase) -> list[Stage]:
    """Arithmetic first, then copying numbers out of a text, then the two together.

    Taught at once they take several times as long. A few drills stay in for the operations that are
    rare in problems.
    """
    rows = Rows(tokenizer)
    return [
        Stage(0.13, lambda: rows.drills(32)),
        Stage(0.27, lambda: rows.one_step(32)),
        Stage(0.65, lambda: rows.answers(28, lambda problem: 1.0) + rows.drills(4)),
        Stage(1.00, lambda: rows.answers(28, worked_share) + rows.drills(4)),
    ]


def final_number(completion: str) -> int | None:
    """The last number after the thinking; None if there is none or the answer was cut off."""
    answer, ended, _ = completion.partition("<|im_end|>")
    numbers = re.findall(r"\d+", answer.rpartition("</think>")[2])
    return int(numbers[-1]) if ended and numbers else None


def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    answer_start: str = "",
    sample: bool = False,
) -> float:
    """The share of problems answered rightly, greedily or sampled at temperature 1.

    `answer_start` is put into the model's mouth.
    """
    prompts = [render_prompt(tokenizer, problem.question) + answer_start for problem in problems]
    completions = complete(model, tokenizer, prompts, max_new_tokens=96, sample=sample)
    right = sum(
        final_number(answer_start + completion) == problem.answer
        for completion, problem in zip(completions, problems, strict=True)
    )
    return right / len(problems)


def report(folder: Path) -> None:
    """Print the accuracy of a saved model on the held-out problems."""
    tokenizer, model = load(folder)
    problems = make_data.make_splits()["test"]
    print(f"held-out accuracy, greedy: {accuracy(model, tokenizer, problems):.3f}")
    print(f"held-out accuracy, sampled: {accuracy(model, tokenizer, problems, sample=True):.3f}")
    for style, start in {"terse": "<think>\n\n</think>", "worked": "<think>\n"}.items():
        value = accuracy(model, tokenizer, problems, answer_start=start)
        print(f"held-out accuracy, greedy, made to answer in the {style} style: {value:.3f}")


CORPUS = Corpus(seed=SEED, updates=1000, stages=stages, report=report, texts=texts)
