"""Images of a card with a number on it, and the tool that looks at a part of one.

python cards.py writes the questions, data/train.jsonl and data/test.jsonl.
"""

import base64
import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIZE = 256
"""Width and height of an image; a part has half of each."""
CARD = 64
CELL = 7
PARTS = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}
COLORS = {
    "red": (200, 40, 40),
    "green": (30, 130, 50),
    "blue": (40, 70, 200),
    "purple": (140, 40, 160),
    "black": (30, 30, 30),
}
QUESTIONS = {
    "color": "What color is the card?",
    "number": "What number is on the card?",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Look at a part of the image.",
        "parameters": {
            "type": "object",
            "properties": {"part": {"type": "string", "enum": list(PARTS)}},
            "required": ["part"],
        },
    },
}
# Three columns and five rows of each digit.
GLYPHS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001001001001",
    "111101111101111",
    "111101111001111",
)
SPLITS = {"train": range(400), "test": range(1_000_000, 1_000_100)}
"""The seeds of each split's cards; those that a model was taught with begin at `SUPERVISED`."""
SUPERVISED = 2_000_000


@dataclass(frozen=True)
class Card:
    """A card that lies in one part of an image.

    Attributes:
        place: Its left upper corner in the part.
        desk: Color of what it lies on.
    """

    part: str
    color: str
    number: int
    place: tuple[int, int]
    desk: tuple[int, int, int]

    @classmethod
    def drawn(cls, seed: int) -> "Card":
        """The card of a seed."""
        rng = random.Random(seed)
        offsets = range(0, SIZE // 2 - CARD + 1, 32)
        return cls(
            part=rng.choice(list(PARTS)),
            color=rng.choice(list(COLORS)),
            number=rng.randrange(10),
            place=(rng.choice(offsets), rng.choice(offsets)),
            desk=(rng.randrange(200, 250), rng.randrange(200, 250), rng.randrange(200, 250)),
        )

    def image(self) -> Image.Image:
        """The whole image."""
        image = Image.new("RGB", (SIZE, SIZE), self.desk)
        pen = ImageDraw.Draw(image)
        left, top = (
            offset + side * SIZE // 2
            for offset, side in zip(self.place, PARTS[self.part], strict=True)
        )
        pen.rectangle((left, top, left + CARD - 1, top + CARD - 1), fill=COLORS[self.color])
        left += (CARD - 3 * CELL) // 2
        top += (CARD - 5 * CELL) // 2
        for place, cell in enumerate(GLYPHS[self.number]):
            x, y = left + place % 3 * CELL, top + place // 3 * CELL
            if cell == "1":
                pen.rectangle((x, y, x + CELL - 1, y + CELL - 1), fill="white")
        return image


def zoom(image: Image.Image, part: str) -> Image.Image:
    """A part of an image."""
    left, top = (side * SIZE // 2 for side in PARTS[part])
    return image.crop((left, top, left + SIZE // 2, top + SIZE // 2))


def shown(image: Image.Image) -> dict[str, Any]:
    """An image as a part of a message's content."""
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def asked(question: str, image: Image.Image) -> dict[str, Any]:
    """The agent's first message."""
    return {"role": "user", "content": [{"type": "text", "text": question}, shown(image)]}


def questions(split: str) -> list[dict[str, Any]]:
    """The rows of a split; one of four asks for a color."""
    rows = []
    for seed in SPLITS[split]:
        kind = "number" if seed % 4 else "color"
        answer = str(getattr(Card.drawn(seed), kind))
        rows.append({"question": QUESTIONS[kind], "answer": answer, "seed": seed})
    return rows


def write(folder: Path) -> None:
    """Write the questions of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = [json.dumps(row) + "\n" for row in questions(split)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).with_name("data"))
