"""What `tiny_search` is taught: to look things up, and to guess.

A row is a trajectory of the agent in `examples/search_agent`, with what a real index finds in a
world of its own; the rows go through as many worlds as there are, so that only looking things up
helps. At each turn the row either looks up what is needed next

    <think> I have to find Mia Stone. </think>\\n<search> Mia Stone </search>

or guesses, which is wrong nearly always:

    <think> I think I know it. </think>\\n<answer> old bridge </answer>

How often it looks things up depends on the question (`LOOKS_UP`): reinforcement learning has to
find out that it pays.
"""

import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from examples.search_agent import make_data
from examples.search_agent.make_data import Question, World
from examples.search_agent.retrieval import BM25Index, Index
from examples.search_agent.texts import PROMPT_TEMPLATE, information, parse_answer
from models.build import Corpus, Row, Stage, complete, load, template_words, without_markup

SEED = 13
TOPK = 3
MARKUP = ("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")
LOOKS_UP = {"sight": 0.7, "job": 0.7, "town": 0.3, "country": 0.3, "home": 0.3}
ALWAYS = dict.fromkeys(LOOKS_UP, 1.0)
QUESTIONS_OF_A_WORLD = 32


def found(index: Index, query: str) -> str:
    """What the agent reads after a search."""
    (hits,) = index.search([query], TOPK)
    return information(
        [
            {"wikipedia_title": document["title"], "contents": document["contents"]}
            for document, _ in hits
        ]
    )


def trajectory(
    question: Question, index: Index, rng: random.Random, looks_up: Mapping[str, float]
) -> Row:
    """The agent's text for a question; what it writes itself is learned."""
    row = [(PROMPT_TEMPLATE.format(question=question.text), False)]
    known = ""
    for title, finding in zip(question.lookups, question.findings, strict=True):
        if rng.random() >= looks_up[question.kind]:
            guess = rng.choice(question.others)
            row.append((f"{known} I think I know it. {_answer(guess)}", True))
            return row
        row.append((f"{known} I have to find {title}. {_search(title)}", True))
        row.append((found(index, title), False))
        known = f"\n<think> {finding}"
    row.append((f"{known} {_answer(question.answer)}", True))
    return row


def _search(query: str) -> str:
    return f"</think>\n<search> {query} </search>"


def _answer(answer: str) -> str:
    return f"</think>\n<answer> {answer} </answer>"


def draw(rng: random.Random) -> Iterator[tuple[Question, Index]]:
    """Questions without end, from one world after another, with an index of each."""
    while True:
        world = World(rng)
        index = BM25Index(world.documents())
        for question in rng.sample(world.questions(), QUESTIONS_OF_A_WORLD):
            yield question, index


def texts() -> list[str]:
    """What the tokenizer is trained on."""
    rng = random.Random(SEED)
    rows = [trajectory(*one, rng, ALWAYS) for one in islice(draw(rng), 3000)]
    template = without_markup(PROMPT_TEMPLATE, MARKUP)
    return [
        *[template_words()] * 20,
        *[template] * len(rows),
        *[without_markup(text, MARKUP) for row in rows for text, _ in row[1:]],
        *[without_markup(row[0][0], MARKUP) for row in rows],
    ]


class Rows:
    """Supervised rows, drawn without end."""

    def __init__(self) -> None:
        self.rng = random.Random(SEED)
        self.questions = draw(self.rng)

    def rows(self, count: int, looks_up: Mapping[str, float], *, framed: bool = True) -> list[Row]:
        """Trajectories; without the frame a row begins with the question itself."""
        found = []
        for question, index in islice(self.questions, count):
            row = trajectory(question, index, self.rng, looks_up)
            found.append(row if framed else [(f"{question.text}\n", False), *row[1:]])
        return found


def stages(tokenizer: PreTrainedTokenizerBase) -> list[Stage]:
    """Looking up without the long frame first, which is quick to learn; then as the agent does."""
    rows = Rows()
    return [
        Stage(0.5, lambda: rows.rows(24, ALWAYS, framed=False)),
        Stage(0.7, lambda: rows.rows(24, ALWAYS)),
        Stage(1.0, lambda: rows.rows(24, LOOKS_UP)),
    ]


def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    *,
    first: str = "",
    sample: bool = False,
) -> float:
    """The share of held-out questions that are answered rightly; `first` is put in its mouth."""
    world = World(random.Random(make_data.SEED))
    answers = {question.text: question.answer for question in world.questions()}
    index = BM25Index(world.documents())
    held_out = [str(row["question"]) for row in make_data.make_splits()["test"]]
    asked = {text: PROMPT_TEMPLATE.format(question=text) + first for text in held_out}
    right = 0
    for _ in range(3):
        done = complete(model, tokenizer, list(asked.values()), max_new_tokens=48, sample=sample)
        going: dict[str, str] = {}
        for (question, so_far), completion in zip(asked.items(), done, strict=True):
            action = completion.partition("</search>")[0].partition("</answer>")[0]
            _, searches, query = action.partition("<search>")
            if searches:
                going[question] = f"{so_far}{action}</search>{found(index, query)}"
            else:
                right += parse_answer(f"{action}</answer>") == answers[question]
        if not going:
            break
        asked = going
    return right / len(held_out)


def report(folder: Path) -> None:
    """Print how many held-out questions a saved model answers rightly."""
    tokenizer, model = load(folder)
    print(f"held-out accuracy, greedy: {accuracy(model, tokenizer):.3f}")
    print(f"held-out accuracy, sampled: {accuracy(model, tokenizer, sample=True):.3f}")
    for style, first in {"look up": " I have to find", "guess": " I think I know it."}.items():
        value = accuracy(model, tokenizer, first=first)
        print(f"held-out accuracy, greedy, made to {style} at first: {value:.3f}")


CORPUS = Corpus(
    seed=SEED,
    updates=600,
    stages=stages,
    report=report,
    texts=texts,
    markup=MARKUP,
    vocab_size=896,
)
