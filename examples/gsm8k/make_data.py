"""Word problems in GSM8K's form, made up from a fixed seed.

A problem is a little story: an opening that gives someone some things, up to two events that add to
them or take from them, and a question that may need one more step (share, multiply, compare).

    {"question": "Mia has 4 boxes with 6 pens in each box. She buys 13 more pens. ...",
     "answer": "There are 4 * 6 = <<4*6=24>>24 pens in the boxes.\\n...\\n#### 37"}

They are not GSM8K's problems and are much easier: one to three steps, whole numbers from 1 to 99.
They stand in for them where a run must be quick and nothing may be downloaded.

    python examples/gsm8k/make_data.py      # writes data/train.jsonl and data/test.jsonl
"""

import json
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = 20251101
TRAIN_SIZE = 3000
TEST_SIZE = 200
LARGEST = 99

# How many problems of each length: the share of problems with 1, 2 and 3 steps.
STEP_WEIGHTS = {1: 0.25, 2: 0.40, 3: 0.35}

NAMES = [
    *((name, "He", "him") for name in ("Tom", "Sam", "Ben", "Max", "Leo", "Dan", "Bob", "Jack")),
    *((name, "She", "her") for name in ("Mia", "Amy", "Eva", "Zoe", "Ann", "Lily", "Sue", "Kate")),
]
THINGS = [
    ("pen", "pens"),
    ("book", "books"),
    ("card", "cards"),
    ("coin", "coins"),
    ("stamp", "stamps"),
    ("shell", "shells"),
    ("apple", "apples"),
    ("orange", "oranges"),
    ("cookie", "cookies"),
    ("marble", "marbles"),
    ("sticker", "stickers"),
    ("flower", "flowers"),
]
HOLDERS = [("box", "boxes"), ("bag", "bags"), ("pack", "packs"), ("jar", "jars")]
COLOURS = ["red", "blue", "green", "white"]
FRIENDS = {2: "two", 3: "three", 4: "four", 5: "five"}


@dataclass(frozen=True)
class Step:
    """One calculation, `left op right = result`, and the sentence that says what it gives."""

    left: int
    op: str
    right: int
    result: int
    sentence: str

    def equation(self) -> str:
        return f"{self.left} {self.op} {self.right} = {self.result}"

    def solution_line(self) -> str:
        """The sentence with the calculation in it, annotated as GSM8K does."""
        marked = f"<<{self.left}{self.op}{self.right}={self.result}>>"
        return self.sentence.format(f"{self.left} {self.op} {self.right} = {marked}{self.result}")


@dataclass(frozen=True)
class Problem:
    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        return self.steps[-1].result

    def row(self) -> dict[str, str]:
        """The problem as a line of the dataset."""
        solution = "\n".join(step.solution_line() for step in self.steps)
        return {"question": self.question, "answer": f"{solution}\n#### {self.answer}"}


class _Dead(Exception):
    """The story cannot go on with the numbers it has; another one is drawn."""


class _Story:
    """A problem while it is being made up: `total` things belong to the hero at this point."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        (self.hero, self.he, self.him), (self.other, _, _) = rng.sample(NAMES, 2)
        self.thing, self.things = rng.choice(THINGS)
        self.sentences: list[str] = []
        self.steps: list[Step] = []
        self.events = 0
        self.total = 0

    def calculate(self, left: int, op: str, right: int, sentence: str) -> int:
        result = {
            "+": left + right,
            "-": left - right,
            "*": left * right,
            "/": left // right,
        }[op]
        if not 1 <= result <= LARGEST:
            raise _Dead
        self.steps.append(Step(left, op, right, result, sentence))
        return result

    def tell(self, *variants: str) -> None:
        self.sentences.append(self.rng.choice(variants))

    # Openings: how the hero comes by the first things.

    def starts_with_some(self) -> None:
        self.total = self.rng.randint(6, 70)
        self.tell(
            f"{self.hero} has {self.total} {self.things}.",
            f"{self.hero} starts with {self.total} {self.things}.",
        )

    def has_two_colours(self) -> None:
        one, two = self.rng.sample(COLOURS, 2)
        a, b = self.rng.randint(3, 60), self.rng.randint(3, 39)
        self.tell(f"{self.hero} has {a} {one} {self.things} and {b} {two} {self.things}.")
        self.total = self.calculate(a, "+", b, f"{self.hero} has {{}} {self.things}.")

    def has_boxes(self) -> None:
        holder, holders = self.rng.choice(HOLDERS)
        a, b = self.rng.randint(2, 9), self.rng.randint(2, 9)
        self.tell(
            f"{self.hero} has {a} {holders} with {b} {self.things} in each {holder}.",
            f"{self.hero} buys {a} {holders} of {b} {self.things} each.",
        )
        self.total = self.calculate(a, "*", b, f"The {holders} hold {{}} {self.things}.")

    def buys_two_kinds(self) -> None:
        (_, many), (_, more) = self.rng.sample(HOLDERS, 2)
        a, b, c, d = (self.rng.randint(2, 9) for _ in range(4))
        self.tell(
            f"{self.hero} buys {a} {many} of {b} {self.things} each and {c} {more} of {d}"
            f" {self.things} each."
        )
        one = self.calculate(a, "*", b, f"The {many} hold {{}} {self.things}.")
        two = self.calculate(c, "*", d, f"The {more} hold {{}} {self.things}.")
        self.total = self.calculate(one, "+", two, f"{self.hero} has {{}} {self.things}.")

    # Events: something is added or taken away.

    def gains(self) -> None:
        self.events += 1
        gain = self.rng.randint(2, 39)
        self.tell(
            f"{self.he} buys {gain} more {self.things}.",
            f"{self.he} finds {gain} more {self.things}.",
            f"{self.other} gives {self.him} {gain} {self.things}.",
        )
        self.total = self.calculate(
            self.total, "+", gain, f"Now {self.hero} has {{}} {self.things}."
        )

    def loses(self) -> None:
        self.events += 1
        loss = self.rng.randint(2, 39)
        self.tell(
            f"{self.he} loses {loss} {self.things}.",
            f"{self.he} sells {loss} {self.things}.",
            f"{self.he} gives {loss} {self.things} to {self.other}.",
        )
        self.total = self.calculate(
            self.total, "-", loss, f"Now {self.hero} has {{}} {self.things}."
        )

    # Endings: the question, with or without a step of its own.

    def asks_for_the_total(self) -> None:
        when = self.rng.choice(["now", "in the end"]) if self.events else "in all"
        self.tell(f"How many {self.things} does {self.hero} have {when}?")

    def asks_for_a_share(self) -> None:
        friends = self.rng.choice([n for n in FRIENDS if self.total % n == 0] or [0])
        if not friends:
            raise _Dead
        self.tell(
            f"{self.he} shares them equally among {friends} friends."
            f" How many {self.things} does each friend get?",
            f"{self.he} puts them into {friends} equal rows."
            f" How many {self.things} are in each row?",
        )
        self.calculate(self.total, "/", friends, f"That makes {{}} {self.things} each.")

    def asks_for_a_multiple(self) -> None:
        times = self.rng.randint(2, 4)
        self.tell(
            f"{self.other} has {times} times as many."
            f" How many {self.things} does {self.other} have?"
        )
        self.calculate(self.total, "*", times, f"{self.other} has {{}} {self.things}.")

    def asks_for_a_price(self) -> None:
        price = self.rng.randint(2, 4)
        self.tell(
            f"{self.he} sells each {self.thing} for {price} dollars."
            f" How many dollars does {self.hero} get?"
        )
        self.calculate(self.total, "*", price, f"{self.hero} gets {{}} dollars.")

    def asks_for_a_comparison(self) -> None:
        difference = self.rng.randint(2, 29)
        word, op = self.rng.choice([("more", "+"), ("fewer", "-")])
        self.tell(
            f"{self.other} has {difference} {word} than {self.hero}."
            f" How many {self.things} does {self.other} have?"
        )
        self.calculate(self.total, op, difference, f"{self.other} has {{}} {self.things}.")


_Part = Callable[[_Story], None]
_OPENINGS: dict[int, list[_Part]] = {
    0: [_Story.starts_with_some],
    1: [_Story.has_boxes, _Story.has_two_colours],
    3: [_Story.buys_two_kinds],
}
_EVENTS: list[_Part] = [_Story.gains, _Story.loses]
_ENDINGS: dict[int, list[_Part]] = {
    0: [_Story.asks_for_the_total],
    1: [
        _Story.asks_for_a_share,
        _Story.asks_for_a_multiple,
        _Story.asks_for_a_price,
        _Story.asks_for_a_comparison,
    ],
}
# Every way to reach a number of steps as (opening, events, ending); at most two events.
_SHAPES = {
    1: [(0, 1, 0), (0, 0, 1), (1, 0, 0)],
    2: [(0, 2, 0), (0, 1, 1), (1, 1, 0), (1, 0, 1)],
    3: [(0, 2, 1), (1, 2, 0), (1, 1, 1), (3, 0, 0)],
}


def make_problem(rng: random.Random) -> Problem:
    """Make up one problem."""
    count = rng.choices(list(STEP_WEIGHTS), list(STEP_WEIGHTS.values()))[0]
    while True:
        opening, events, ending = rng.choice(_SHAPES[count])
        parts = [
            rng.choice(_OPENINGS[opening]),
            *rng.choices(_EVENTS, k=events),
            rng.choice(_ENDINGS[ending]),
        ]
        story = _Story(rng)
        try:
            for part in parts:
                part(story)
        except _Dead:
            continue
        return Problem(" ".join(story.sentences), tuple(story.steps))


def problems(seed: int, exclude: Collection[str] = ()) -> Iterator[Problem]:
    """An endless stream of problems without those whose question is in `exclude`."""
    rng = random.Random(seed)
    while True:
        problem = make_problem(rng)
        if problem.question not in exclude:
            yield problem


def make_splits() -> dict[str, list[Problem]]:
    """The shipped problems, "test" and "train"; no question occurs twice."""
    unique: dict[str, Problem] = {}
    for problem in problems(SEED):
        unique.setdefault(problem.question, problem)
        if len(unique) == TEST_SIZE + TRAIN_SIZE:
            break
    everything = list(unique.values())
    return {"test": everything[:TEST_SIZE], "train": everything[TEST_SIZE:]}


def write(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in make_splits().items():
        lines = "".join(json.dumps(problem.row()) + "\n" for problem in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent / "data")
