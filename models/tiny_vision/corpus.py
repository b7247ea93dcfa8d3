"""What `tiny_vision` is taught: to look closer, and to guess.

A row is a conversation of the agent in `examples/vision`. The color of a card is answered at once.
Asked for its number, the row either zooms, and answers with what is seen there

    <image> What number is on the card? -> zoom("top left") -> <image> -> It is 7.

or guesses, which is wrong nearly always. How often it zooms is `ZOOMS`, and how often into the
right part `RIGHT`: reinforcement learning has to find out that it pays. Most of the training comes
before that and is shorter: an answer about one image, without tools.
"""

import json
import random
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.qwen3_vl import Qwen3VLForConditionalGeneration

from examples.vision.cards import PARTS, QUESTIONS, SPLITS, SUPERVISED, TOOL, Card, asked, zoom
from models.build import HERE, Corpus, Stage, to_tensors, without_markup
from models.vision import TOKENS, inputs

SEED = 17
ZOOMS = 0.4
RIGHT = 0.7
AGAIN = 0.5  # after it zoomed into a wrong part
CALL = "<tool_call>"
PLACEHOLDER = "".join(TOKENS[:3])
TEMPLATE = "tiny_vision/chat_template.jinja"
Messages = list[dict[str, Any]]
Row = list[tuple[str | Image, bool]]


def says(answer: object) -> dict[str, Any]:
    """The message that answers."""
    return {"role": "assistant", "content": f"It is {answer}."}


def zooms(part: str) -> dict[str, Any]:
    """The message that zooms."""
    function = {"name": "zoom", "arguments": json.dumps({"part": part})}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def ask(kind: str, image: Image) -> dict[str, Any]:
    """The message that asks for something in an image."""
    return asked(QUESTIONS["color" if kind == "color" else "number"], image)


def conversation(
    card: Card, kind: str, rng: random.Random, chance: float = ZOOMS, right: float = RIGHT
) -> tuple[Messages, list[Image]]:
    """The agent's messages for a question about a card, and the images in them."""
    image = card.image()
    messages, images = [ask(kind, image)], [image]
    if kind == "color":
        return [*messages, says(card.color)], images
    while rng.random() < chance:
        part = card.part if rng.random() < right else rng.choice(list(PARTS))
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
    tools: list[Any] | None = None,
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
        self.cards = map(Card.drawn, count(SUPERVISED))

    def short(self, number: int) -> list[Row]:
        """One answer without tools: a color, the part to zoom into, the number in a part."""
        rows: list[Row] = []
        for card in islice(self.cards, number):
            kind = self.rng.choice(["color", "part", "part", "number", "number"])
            image = zoom(card.image(), card.part) if kind == "number" else card.image()
            answer = zooms(card.part) if kind == "part" else says(getattr(card, kind))
            rows.append(row_of(self.tokenizer, [ask(kind, image), answer], [image]))
        return rows

    def rows(self, number: int) -> list[Row]:
        """Conversations, one of six about a color. In three a call is right, and all but the
        decision to call is learned: it is not to call more often, but to see well."""
        found = []
        for card in islice(self.cards, number):
            kind = self.rng.choice(["color", "number", "number", "see", "see", "see"])
            certain = (1.0, 1.0) if kind == "see" else ()
            messages, images = conversation(card, kind, self.rng, *certain)
            row = row_of(self.tokenizer, messages, images, [TOOL])
            if kind == "see":
                row[3:4] = [(CALL, False), (str(row[3][0]).removeprefix(CALL), True)]
            found.append(row)
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
        Stage(0.65, lambda: rows.short(64)),
        Stage(1.0, lambda: rows.rows(16)),
    ]


@torch.no_grad()
def accuracy(model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Shares of greedy answers about held-out cards that are right: which color a card has, into
    which part to zoom once it zooms, and which number is in that part; and how often it zooms."""
    found: dict[str, list[bool]] = {"color": [], "zooms": [], "part": [], "number": []}
    for card in map(Card.drawn, SPLITS["test"]):
        for kind in ("color", "number"):
            messages, images = conversation(card, kind, random.Random(SEED), 1.0, 1.0)
            row = row_of(tokenizer, messages, images, [TOOL])
            ids, labels = to_tensors(tokenizer, [row])
            logits = model(input_ids=ids, **inputs(model, ids, images)).logits
            right = (logits.argmax(-1)[:, :-1] == ids[:, 1:])[labels[:, 1:] != -100].tolist()
            if kind == "number":
                call = len(tokenizer(row[3][0])["input_ids"])
                found["zooms"].append(right[0])
                found["part"].append(all(right[1:call]))
                right = right[call:]
            found[kind].append(all(right))
    return {name: sum(values) / len(values) for name, values in found.items()}


def load(folder: Path) -> tuple[PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration]:
    """Tokenizer and model of a folder."""
    return (
        PreTrainedTokenizerFast.from_pretrained(folder),
        Qwen3VLForConditionalGeneration.from_pretrained(folder),
    )


def report(folder: Path) -> None:
    """Print what the model sees in held-out images, and how often it zooms."""
    tokenizer, model = load(folder)
    for name, share in accuracy(model, tokenizer).items():
        print(f"held-out, greedy, {name}: {share:.3f}")


CORPUS = Corpus(
    seed=SEED,
    updates=700,
    stages=stages,
    report=report,
    texts=texts,
    template=TEMPLATE,
    images=True,
)
