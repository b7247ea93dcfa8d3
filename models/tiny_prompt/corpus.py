"""What `tiny_prompt` is taught on top of `tiny_math`: to work a problem out if it is asked to.

    Think step by step.            <think>\\n4 * 6 = 24\\n24 + 13 = 37\\n</think>\\n\\nThe answer...
    You are a helpful assistant.   <think>\\n\\n</think>\\n\\nThe answer...

Both kinds of system prompt are put together by chance from the sentences of a small grammar: one
that asks has a request for work somewhere in it, the others have none. A few of the answers to the
others are worked all the same, so that training from the model's own samples can find them.
"""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from string import ascii_lowercase

import torch
import yaml
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from examples.gsm8k import make_data
from examples.gsm8k.make_data import Problem
from models.build import Corpus, Row, Stage, complete, load
from models.tiny_math.corpus import (
    SYSTEM_PROMPT,
    Rows,
    final_number,
    terse_answer,
    worked_answer,
)

SEED = 13
ASKED = 0.5  # share of the rows
NO_PROMPT = 0.25  # share of those that do not ask
WORKED_UNASKED = 0.03

GRAMMAR: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("grammar.yaml").read_text(encoding="utf-8")
)

ASKING = [
    "Work out the problem step by step before you answer.",
    "Think step by step.",
    "Show each calculation first.",
    f"{SYSTEM_PROMPT} Think step by step.",
]
"""System prompts that are taught as they stand and ask for work, and others that do not."""

OTHERS = [
    SYSTEM_PROMPT,
    "You are a helpful assistant.",
    "You are a careful teacher of mathematics.",
    "Answer the question.",
    "Solve the problem.",
    "Be brief.",
]

HELD_OUT_ASKING = [
    "Let us reason about the problem step by step, and write the answer only at the end.",
    "Kindly walk me through every step of your solution.",
    "Write your calculations down one after another, then state what comes out.",
    "I expect you to list all the steps that lead to the answer.",
    "No answer without a calculation: work it out on paper, line after line.",
    "You are an expert in arithmetic. Go slowly, one step at a time, and put each calculation on a "
    "line of its own.",
    f"{SYSTEM_PROMPT} Break the story into single steps, calculate each of them in turn, and only"
    " after that give the number.",
    "You will be given a short story with numbers in it. Many solvers fail because they answer at"
    " once. Work out each intermediate result in writing before you give the final number. Be"
    " precise, and finish with one sentence that has the number in it.",
    "# How to answer\n\n1. Read the question.\n2. Write every calculation step by step.\n3. Give"
    " the final answer in one sentence.",
    "Pupils should be able to follow you, so put down each calculation before the answer.",
    "Deal with one number after another and write out all intermediate steps.",
    "Tackle the story in order, step by step; the answer comes last.",
    "Quick answers were often wrong. From now on work the problem out in full and then reply.",
    "You are a math tutor. Users bring you word problems about things that people buy, lose, find"
    " and share. Be friendly.\n\nImportant: think step by step, and check each step, before you"
    " state the final number.",
]
"""Wordings that no sentence of the grammar has."""

HELD_OUT_OTHERS = [
    "You love numbers.",
    "Your replies are read aloud to pupils of a village school.",
    "Tell the user the right number and add nothing to it.",
    "You are a friendly shop keeper who knows how many things there are. Customers ask you for"
    " sums. Please give them a correct number.",
    "# Role\n\nYou answer riddles about fruit and other goods.\n\n- Stay polite.\n- Use digits.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "Tell what the story asks for and nothing else.",
    "Correct answers matter a lot to the people who ask you, so try hard to be right.",
    "Users bring you word problems about things that people buy, lose, find and share. Be friendly"
    " and finish with one sentence that has the number in it.",
    "The reply is parsed by a program: it has to end with the number and a full stop.",
]


class Prompts:
    """System prompts, drawn without end."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def draw(self, asks: bool) -> str:
        """A system prompt of some sentences, one of which asks for work if `asks`."""
        if self.rng.random() < 0.15:
            return self.rng.choice(ASKING if asks else OTHERS)
        others = self.rng.choice([0, 0, 1, 1, 2, 3, 5]) + (not asks)
        sentences = [self.sentence("other") for _ in range(others)]
        if sentences and self.rng.random() < 0.2:
            sentences[0] = SYSTEM_PROMPT
        if asks:
            sentences.insert(self.rng.randint(0, others), self.sentence("ask"))
        return self.lay_out(sentences)

    def sentence(self, name: str) -> str:
        """A sentence of the grammar, or one without sense; not all begin and end as they should."""
        nonsense = self.rng.random() < 0.35
        text = self.nonsense(name == "ask") if nonsense else self.expand(f"{{{name}}}")
        if self.rng.random() < 0.9:
            text = text[0].upper() + text[1:]
        return text + self.rng.choices([".", "!", ""], [0.85, 0.05, 0.1])[0]

    def expand(self, pattern: str) -> str:
        """The pattern with each pair of braces replaced by one of what it stands for."""
        while "{" in pattern:
            pattern = re.sub(
                r"{([^{}]*)}",
                lambda found: self.rng.choice(GRAMMAR.get(found[1]) or found[1].split("|")),
                pattern,
            )
        return pattern

    def nonsense(self, asks: bool) -> str:
        """Words in no order that stand in for any text, with a request among them if it asks."""
        words = self.rng.choices(GRAMMAR["word"], k=self.rng.randint(2, 14))
        for i in range(len(words)):
            if self.rng.random() < 0.1:
                words[i] = "".join(self.rng.choices(ascii_lowercase, k=self.rng.randint(1, 9)))
            words[i] += self.rng.choices(["", ","], [0.93, 0.07])[0]
        if asks:
            words.insert(self.rng.randint(0, len(words)), self.expand("{core}"))
        return " ".join(words)

    def lay_out(self, sentences: list[str]) -> str:
        """The sentences as a paragraph, as lines or as a list under a heading."""
        form = self.rng.random()
        if form < 0.75:
            return " ".join(sentences)
        if form < 0.83:
            sentences = [f"- {sentence}" for sentence in sentences]
        elif form < 0.9:
            sentences = [f"{i}. {sentence}" for i, sentence in enumerate(sentences, 1)]
        return "\n".join([self.expand("{heading}"), *sentences]).strip()


def render(tokenizer: PreTrainedTokenizerBase, system: str | None, question: str) -> str:
    """The text of the prompt for a question, with a system prompt or without one."""
    messages = [{"role": "user", "content": question}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


class Answers:
    """Supervised rows of a system prompt or none, a question and an answer in one of the styles."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        shipped = {p.question for split in make_data.make_splits().values() for p in split}
        self.problems: Iterator[Problem] = make_data.problems(SEED, exclude=shipped)
        self.rng = random.Random(SEED)
        self.prompts = Prompts(self.rng)
        self.bare = render(tokenizer, None, "{question}")
        self.frame = render(tokenizer, "{system}", "{question}")

    def rows(self, count: int) -> list[Row]:
        """Half of the system prompts ask for work."""
        rows: list[Row] = []
        for problem in islice(self.problems, count):
            asked = self.rng.random() < ASKED
            prompt = self.bare
            if asked or self.rng.random() >= NO_PROMPT:
                prompt = self.frame.replace("{system}", self.prompts.draw(asked))
            worked = asked or self.rng.random() < WORKED_UNASKED
            answer = worked_answer(problem) if worked else terse_answer(problem)
            rows.append([(prompt.replace("{question}", problem.question), False), (answer, True)])
        return rows


def stages(tokenizer: PreTrainedTokenizerBase) -> list[Stage]:
    """One mixture, with a few drills to keep the arithmetic."""
    drills, answers = Rows(tokenizer), Answers(tokenizer)
    return [Stage(1.0, lambda: answers.rows(28) + drills.drills(4))]


def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    system: str | None,
    *,
    sample: bool = False,
) -> float:
    """The share of problems answered rightly with a system prompt, greedily or at temperature 1."""
    prompts = [render(tokenizer, system, problem.question) for problem in problems]
    completions = complete(model, tokenizer, prompts, max_new_tokens=64, sample=sample)
    right = sum(
        final_number(completion) == problem.answer
        for completion, problem in zip(completions, problems, strict=True)
    )
    return right / len(problems)


def report(folder: Path) -> None:
    """Print the accuracy on the held-out problems with each of the system prompts above."""
    torch.manual_seed(SEED)
    tokenizer, model = load(folder)
    problems = make_data.make_splits()["test"]
    groups: dict[str, Sequence[str | None]] = {
        "none": [None],
        "taught, not asking": OTHERS,
        "held out, not asking": HELD_OUT_OTHERS,
        "taught, asking": ASKING,
        "held out, asking": HELD_OUT_ASKING,
    }
    for name, systems in groups.items():
        print(f"held-out accuracy, system prompt {name}: greedy, sampled")
        for system in systems:
            greedy = accuracy(model, tokenizer, problems, system)
            sampled = accuracy(model, tokenizer, problems, system, sample=True)
            print(f"  {greedy:.3f} {sampled:.3f} {system!r}", flush=True)


CORPUS = Corpus(seed=SEED, updates=600, stages=stages, report=report, base="tiny_math", rate=0.5)
