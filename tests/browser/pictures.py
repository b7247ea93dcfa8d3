"""Compares what a browser shows with a small picture in the repository, whatever the fonts.

Both are shrunk to cells of 10 pixels that are black where something is drawn: columns, tables,
bars and pictures are seen, letters are not. `TUNER_WRITE_PICTURES=1 pytest tests/browser` writes
them anew.
"""

import os
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageChops, ImageFilter, ImageOps, ImageStat
from playwright.sync_api import Page

PICTURES = Path(__file__).parent / "pictures"
CELL = 10
INK = 12
"""Of 255: how far a cell is from the page's most frequent colour if something is drawn there."""
NEAR = 5
"""Cells across within which the same thing may stand elsewhere: other fonts are wider or higher."""
MOST = 0.12
"""Share of drawn cells without a partner up to which a picture is the same."""


def check_picture(page: Page, name: str, folder: Path) -> None:
    """Compares what the page shows with `pictures/NAME.png`.

    Raises:
        AssertionError: It looks otherwise; what was seen is in the folder.
    """
    seen = _small(page.screenshot(animations="disabled"))
    kept = PICTURES / f"{name}.png"
    if os.environ.get("TUNER_WRITE_PICTURES"):
        PICTURES.mkdir(exist_ok=True)
        seen.save(kept, optimize=True)
    share = difference(Image.open(kept), seen)
    full = folder / f"{name}.png"
    page.screenshot(path=full)
    assert share <= MOST, (
        f"{share:.0%} of {name} looks otherwise than {kept}: see {full}; if that is as it should "
        "be, set TUNER_WRITE_PICTURES=1"
    )


def difference(first: Image.Image, second: Image.Image) -> float:
    """The share of drawn cells near which the other picture has none."""
    assert first.size == second.size, "the window has another size"
    one, other = (ImageOps.invert(picture.convert("L")) for picture in (first, second))
    lonely = [
        ImageChops.subtract(drawn, there.filter(ImageFilter.MaxFilter(NEAR)))
        for drawn, there in ((one, other), (other, one))
    ]
    return _sum(lonely) / max(1.0, _sum([one, other]))


def _sum(pictures: list[Image.Image]) -> float:
    return sum(ImageStat.Stat(picture).sum[0] for picture in pictures)


def _small(screenshot: bytes) -> Image.Image:
    whole = Image.open(BytesIO(screenshot)).convert("L")
    cells = whole.resize((whole.width // CELL, whole.height // CELL), Image.Resampling.BOX)
    histogram = cells.histogram()
    background = histogram.index(max(histogram))
    return cells.point(lambda value: 255 * (abs(value - background) <= INK)).convert("1")
