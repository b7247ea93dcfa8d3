"""Makes the pictures of the page: `python -m tests.browser.screenshot [RUN]`.

Without a run docs/viewer.png, of a run made by hand; with one, which `make demo-real` left,
docs/real_run.png. A picture knows the titles that are in it, and a test compares them with the
page's.
"""

import sys
import tempfile
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image, PngImagePlugin
from playwright.sync_api import sync_playwright

from tests.browser.conftest import ARGUMENTS, chromium
from tests.browser.example_run import write_example
from tuner.tools.viewer import write_report

DOCS = Path(__file__).parents[2] / "docs"
COLOURS = 256
TITLES = "Titles"
"""The text of a picture that has a title on each line."""


@contextmanager
def opened(run, width):
    """The page of a run in a window of this width."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": width, "height": 1000})
        page.goto(write_report(run).as_uri())
        page.locator("#charts circle").first.wait_for()
        yield page
        browser.close()


def take(page, height, path):
    """Write the upper part of the page, and the titles in it."""
    page.evaluate("scrollTo(0, 0)")
    size = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height}
    taken = page.screenshot(full_page=True, clip=size)
    titles = [
        title.inner_text()
        for title in page.locator("h3:not(#detail h3):visible").all()
        if title.bounding_box()["y"] < height
    ]
    text = PngImagePlugin.PngInfo()
    text.add_text(TITLES, "\n".join(titles))
    # A page has few colours: with a palette the file is a third as large.
    palette = Image.open(BytesIO(taken)).quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1)
    palette.save(path, optimize=True, pnginfo=text)
    print(path)


def main():
    if run := sys.argv[1:]:
        with opened(Path(run[0]), 1280) as page:
            take(page, 1000, DOCS / "real_run.png")
        return
    with tempfile.TemporaryDirectory() as folder:
        marbles = write_example(Path(folder) / "marbles", steps=20, completed=True)
        with opened(marbles, 1440) as page:
            page.get_by_role("button", name="reasoning removed").click()
            page.locator("#list .row", has_text="1-0-3").click()
            page.locator("#detail .branch").wait_for()
            take(page, 2100, DOCS / "viewer.png")


if __name__ == "__main__":
    main()
