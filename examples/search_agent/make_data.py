"""A little world that nobody has read about: people, towns, and questions that need a search.

    {"title": "Mia Stone", "contents": "Mia Stone was born in Arlon. She is a painter."}
    {"title": "Arlon", "contents": "Arlon is a town in Vestria. It is known for its old bridge."}
    {"question": "In which country was Mia Stone born?", "answer": ["Vestria"], "hops": 2}

Who was born where is drawn at random, so no model can know it: it has to look it up. Questions with
two hops need a second search for what the first one found.

    python examples/search_agent/make_data.py   # writes data/{corpus,train,test}.jsonl
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

SEED = 20251102
PEOPLE = 120
TEST_SIZE = 120

FIRST_NAMES = {
    "She": ("Mia", "Amy", "Eva", "Zoe", "Ann", "Lily", "Sue", "Kate"),
    "He": ("Tom", "Sam", "Ben", "Max", "Leo", "Dan", "Bob", "Jack"),
}
SURNAMES = (
    *("Stone", "Hill", "Wood", "Brook", "Field", "Marsh", "Lake", "Banks"),
    *("Cook", "Baker", "Mason", "Smith", "Carter", "Fisher", "Hunter", "Miller"),
    *("Gray", "Brown", "White", "Green", "Young", "Long", "Sharp", "Wise"),
)
TOWNS = (
    *("Arlon", "Belmar", "Corvo", "Delphin", "Elsted", "Farum", "Gorin", "Hallen"),
    *("Istra", "Jorvik", "Kelso", "Lumen", "Moravo", "Narvi", "Orlan", "Pelham"),
    *("Quell", "Rosten", "Selby", "Torvald", "Ulmen", "Vargas", "Welden", "Yarrow"),
    *("Zermat", "Ambra", "Brenn", "Calder", "Dorset", "Evora"),
)
COUNTRIES = ("Vestria", "Norland", "Sudania", "Ostrany", "Kaldor", "Meridia", "Tarsus", "Pomona")
JOBS = (
    *("painter", "doctor", "pilot", "farmer", "singer", "teacher"),
    *("lawyer", "sailor", "dentist", "writer", "tailor", "judge"),
)
ADJECTIVES = ("old", "tall", "red", "great", "quiet", "golden")
SIGHTS = ("bridge", "tower", "market", "garden", "castle", "harbour")


@dataclass(frozen=True)
class Person:
    name: str
    pronoun: str
    town: str
    job: str

    def document(self) -> dict[str, str]:
        contents = f"{self.name} was born in {self.town}. {self.pronoun} is a {self.job}."
        return {"title": self.name, "contents": contents}


@dataclass(frozen=True)
class Town:
    name: str
    country: str
    sight: str

    def document(self) -> dict[str, str]:
        contents = f"{self.name} is a town in {self.country}. It is known for its {self.sight}."
        return {"title": self.name, "contents": contents}


@dataclass(frozen=True)
class Question:
    """A question and how to find its answer.

    Attributes:
        lookups: The titles to search for, in order.
        findings: What each document says that leads on; the last one to the answer.
        others: Every answer that a question of its kind may have, to guess from.
    """

    kind: str
    text: str
    answer: str
    lookups: tuple[str, ...]
    findings: tuple[str, ...]
    others: tuple[str, ...]

    def row(self) -> dict[str, object]:
        """The question as a line of the dataset, in the form of the seed notebook."""
        return {"question": self.text, "answer": [self.answer], "hops": len(self.lookups)}


class World:
    """People and towns drawn with a random generator."""

    def __init__(self, rng: random.Random, people: int = PEOPLE) -> None:
        sights = [f"{adjective} {sight}" for adjective in ADJECTIVES for sight in SIGHTS]
        self.towns = {
            name: Town(name, rng.choice(COUNTRIES), sight)
            for name, sight in zip(TOWNS, rng.sample(sights, len(TOWNS)), strict=True)
        }
        names = [
            (f"{first} {last}", pronoun)
            for pronoun, firsts in FIRST_NAMES.items()
            for first in firsts
            for last in SURNAMES
        ]
        self.people = [
            Person(name, pronoun, rng.choice(TOWNS), rng.choice(JOBS))
            for name, pronoun in rng.sample(names, people)
        ]
        self._sights = tuple(sights)

    def documents(self) -> list[dict[str, str]]:
        people = [person.document() for person in self.people]
        return people + [town.document() for town in self.towns.values()]

    def questions(self) -> list[Question]:
        """Every question about this world."""
        found = []
        for town in self.towns.values():
            known = f"{town.name} is known for its {town.sight}."
            text = f"What is {town.name} known for?"
            found.append(Question("sight", text, town.sight, (town.name,), (known,), self._sights))
        for person in self.people:
            name, town = person.name, self.towns[person.town]
            born = f"{name} was born in {town.name}."
            country = f"{town.name} is in {town.country}."
            known = f"{town.name} is known for its {town.sight}."
            job = f"{name} is a {person.job}."
            both = (name, town.name)
            found += [
                Question("job", f"What is the job of {name}?", person.job, (name,), (job,), JOBS),
                Question(
                    "town",
                    f"In which town was {name} born?",
                    town.name,
                    (name,),
                    (born,),
                    TOWNS,
                ),
                Question(
                    "country",
                    f"In which country was {name} born?",
                    town.country,
                    both,
                    (born, country),
                    COUNTRIES,
                ),
                Question(
                    "home",
                    f"What is the town where {name} was born known for?",
                    town.sight,
                    both,
                    (born, known),
                    self._sights,
                ),
            ]
        return found


def make_splits() -> dict[str, list[dict[str, object]]]:
    """The shipped world: its documents, and its questions in two parts, mixed."""
    rng = random.Random(SEED)
    world = World(rng)
    questions = world.questions()
    rng.shuffle(questions)
    rows = [question.row() for question in questions]
    return {
        "corpus": [dict(document) for document in world.documents()],
        "test": rows[:TEST_SIZE],
        "train": rows[TEST_SIZE:],
    }


def write(folder: Path) -> None:
    """Write `corpus.jsonl`, `train.jsonl` and `test.jsonl` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in make_splits().items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent / "data")
