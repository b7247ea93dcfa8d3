"""What `tiny_vision` is taught: to look closer, and to guess.

A row is a conversation of the agent in `examples/vision`. The color of a card is answered at once.
Its number is too small to be read in the whole image: the row either zooms

    <image> What number is on the card? -> zoom("top left") -> <image> -> It is 7.

or guesses, which is wrong nearly always. How often it zooms is `ZOOMS`, and how often into the right
part `RIGHT`: reinforcement learning has to find out that it pays. Half of the training is shorter:
what is in an image, without the conversation around it.
"""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

from PIL.Image import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from examples.vision.cards import PARTS, QUESTIONS, TOOL, Card, asked, cards, zoom
from models.build import HERE, Corpus, Row, Stage, without_markup
from models.vision import TOKENS

SEED = 17
ZOOMS = 0.4
RIGHT = 0.7
AGAIN = 0.5  # after it zoomed into a wrong part
PLACEHOLDER = "".join(TOKENS[:3])
TEMPLATE = "tiny_vision/chat_template.jinja"
Messages = list[dict[str, Any]]


def says(answer: object) -> dict[str, Any]:
    """The message that answers."""
    return {"role": "assistant", "content": f"It is {answer}."}


def zooms(part: str) -> dict[str, Any]:
    """The message that zooms."""
    function = {"name": "zoom", "arguments": json.dumps({"part": part})}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def ask(kind: str, image: Image) -> dict[str, Any]:
    """The message that asks for something in an image."""
    return asked(QUESTIONS[kind], image)


def conversation(card: Card, kind: str, rng: random.Random) -> tuple[Messages, list[Image]]:
    """The agent's messages for a question about a card, and the images in them."""
    image = card.draw()
    messages, images = [ask(kind, image)], [image]
    if kind == "color":
        return [*messages, says(card.color)], images
    chance = ZOOMS
    while rng.random() < chance:
        part = card.part if rng.random() < RIGHT else rng.choice(list(PARTS))
        images.append(zoom(image, part))
        messages += [zooms(part), {"role": "tool", "content": [{"type": "image"}]}]
        if part == card.part:
            return [*messages, says(card.number)], images
        chance = AGAIN
    return [*messages, says(rng.randrange(10))], images


def row_of(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    images: list[Image],
    tools: list[dict[str, Any]] | None = None,
) -> Row:
    """A conversation as the chat template writes it; what the assistant writes is learned."""

    def written(count: int, **more: Any) -> str:
        text = tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False, **more)
        assert isinstance(text, str)
        return text

    row: Row = []
    left, done = iter(images), 0
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = written(place, add_generation_prompt=True)
        before, *after = prompt[done:].split(PLACEHOLDER)
        row.append((before, False))
        for text in after:
            row += [(next(left), False), (text, False)]
        answer = written(place + 1)[len(prompt) :].removesuffix("\n")
        row.append((answer, True))
        done = len(prompt) + len(answer)
    return row


class Rows:
    """Supervised rows, drawn without end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(SEED)
        self.cards = cards("supervised")

    def short(self, count: int) -> list[Row]:
        """One answer without tools: a color, the part to zoom into, the number in a part."""
        rows: list[Row] = []
        for card in islice(self.cards, count):
            kind = self.rng.choice(["color", "part", "number", "number"])
            image = zoom(card.draw(), card.part) if kind == "number" else card.draw()
            answer = zooms(card.part) if kind == "part" else says(getattr(card, kind))
            question = ask("color" if kind == "color" else "number", image)
            rows.append(row_of(self.tokenizer, [question, answer], [image]))
        return rows

    def rows(self, count: int) -> list[Row]:
        """Conversations, one of four about a color."""
        found = []
        for card in islice(self.cards, count):
            kind = self.rng.choice(["color", "number", "number", "number"])
            messages, images = conversation(card, kind, self.rng)
            found.append(row_of(self.tokenizer, messages, images, [TOOL]))
        return found


def texts() -> list[str]:
    """What the tokenizer is trained on."""
    template = (HERE / TEMPLATE).read_text(encoding="utf-8")
    unlettered = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=template
    )
    rows = Rows(unlettered).rows(200)
    return [without_markup(text) for row in rows for text, _ in row if isinstance(text, str)]


def stages(tokenizer: PreTrainedTokenizerBase) -> list[Stage]:
    """What is in images first, which is quick to learn; then as the agent is asked."""
    rows = Rows(tokenizer)
    return [
        Stage(0.7, lambda: rows.short(64)),
        Stage(1.0, lambda: rows.rows(16)),
    ]


def report(folder: Path) -> None:
    """Print the reward of the example's agent."""


CORPUS = Corpus(
    seed=SEED,
    updates=1000,
    stages=stages,
    report=report,
    texts=texts,
    template=TEMPLATE,
    images=True,
)
