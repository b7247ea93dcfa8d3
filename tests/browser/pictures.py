"""Compares what a browser shows with a small picture in the repository, whatever the fonts.

A picture has a pixel for each cell of 20 by 20, as bright as the cell has edges: letters are no
longer seen, but where there is text, a line of a chart, a table or a border is. On a page of 1440
by 1000, a font that is a tenth narrower changes 1 % of the cells, and a list or charts that are
missing change 10 to 40 %. `TUNER_WRITE_PICTURES=1 pytest tests/browser` writes the pictures anew.
"""

import os
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageChops, ImageFilter, ImageStat
from playwright.sync_api import Page

PICTURES = Path(__file__).parent / "pictures"
CELL = 20
EDGE = 40
"""Of 255: an edge has at least this contrast."""
DIFFERENT = 50
"""Of 255: a cell that differs by more is another one."""
MOST = 0.04
"""Share of such cells up to which a picture is the same."""


def check_picture(page: Page, name: str, folder: Path) -> None:
    """Compares what the page shows with `pictures/NAME.png`.

    Raises:
        AssertionError: It looks otherwise; what was seen is in the folder.
    """
    screenshot = page.screenshot(animations="disabled")
    seen, kept = edges(Image.open(BytesIO(screenshot))), PICTURES / f"{name}.png"
    if os.environ.get("TUNER_WRITE_PICTURES"):
        PICTURES.mkdir(exist_ok=True)
        seen.save(kept, optimize=True)
    share, full = difference(Image.open(kept), seen), folder / f"{name}.png"
    full.write_bytes(screenshot)
    assert share <= MOST, (
        f"{share:.0%} of {name} looks otherwise than {kept}: see {full}; if that is as it should "
        "be, set TUNER_WRITE_PICTURES=1"
    )


def difference(first: Image.Image, second: Image.Image) -> float:
    """The share of cells that differ; lines of text may stand a cell higher or lower."""
    assert first.size == second.size, "the window has another size"
    blurred = [one.filter(ImageFilter.GaussianBlur(2)) for one in (first, second)]
    far = ImageChops.difference(*blurred).point(lambda value: 255 * (value > DIFFERENT))
    return ImageStat.Stat(far).mean[0] / 255


def edges(screenshot: Image.Image) -> Image.Image:
    """How many pixels of each cell are edges; a quarter or more is white."""
    found = screenshot.convert("L").filter(ImageFilter.FIND_EDGES)
    found = found.point(lambda value: 255 * (value > EDGE))
    found = found.crop((2, 2, found.width - 2, found.height - 2))  # the window's own edge
    size = screenshot.width // CELL, screenshot.height // CELL
    return found.resize(size, Image.Resampling.BOX).point(lambda value: min(255, 4 * value))
