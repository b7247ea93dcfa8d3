"""Makes docs/viewer.png from the real page: `python -m tests.browser.screenshot`."""

import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.conftest import ARGUMENTS, chromium
from tests.browser.example_run import write_example
from tuner.tools.viewer import write_report

PICTURE = Path(__file__).parents[2] / "docs/viewer.png"
COLOURS = 256


def main():
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        link = write_report(
            write_example(Path(folder) / "marbles", steps=20, completed=True)
        ).as_uri()
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(link)
        page.get_by_role("button", name="reasoning removed").click()
        page.locator("#list .row", has_text="1-0-3").click()
        page.locator("#detail .branch").wait_for()
        page.evaluate("scrollTo(0, 0)")
        taken = page.screenshot(
            full_page=True, clip={"x": 0, "y": 0, "width": 1440, "height": 2100}
        )
        browser.close()
    # A page has few colours: with a palette the file is a third as large.
    palette = Image.open(BytesIO(taken)).quantize(COLOURS, Image.Quantize.MAXCOVERAGE)
    palette.save(PICTURE, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    main()
