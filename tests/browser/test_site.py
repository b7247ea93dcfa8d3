"""The documentation's site, as `make docs` builds it, in a real browser and without a network."""

import functools
import html
import re
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.pictures import check_picture
from tests.pages import LOGS, MOST_WORDS, ROOT

MKDOCS = ROOT / ".venv-docs/bin/mkdocs"
SHOWN = {
    "home": "",
    "tutorial": "docs/tutorial/",
    "serving": "docs/serving/",
    "configuration": "docs/reference/configuration/data/",
    "foreign_keys": "docs/reference/configuration/trinity_rft/",
    "api": "docs/reference/api/training/",
    "backends": "docs/reference/capabilities/",
    "benchmarks": "benchmarks/training/",
}

WIDE_TABLES = """() => [...document.querySelectorAll("article table")].map((table) => [
    table.parentElement.scrollWidth - table.parentElement.clientWidth, table.innerText.slice(0, 80)
]).filter(([over]) => over > 1)"""
BROKEN_KEYS = """() => [...document.querySelectorAll("article :not(pre) > code")].flatMap((code) =>
    [...code.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).flatMap((node) =>
        [...node.data.matchAll(/\\w+/g)].filter((word) => {
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1;
        }).map((word) => word[0])))"""


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    assert MKDOCS.exists(), "make docs makes the environment that the site is built in"
    built = subprocess.run(
        [MKDOCS, "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": str(MKDOCS.parent)},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="session")
def address(site):
    """The site's URL."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", SHOWN)
def test_pages_look_as_they_did(name, page, address, tmp_path):
    page.goto(address + SHOWN[name], wait_until="networkidle")
    expect(page.locator("article h1")).to_be_visible()
    check_picture(page, name, tmp_path)


@pytest.mark.parametrize("width", [1440, 1100])
def test_tables_fit_and_keys_break_between_words(width, page, address):
    page.set_viewport_size({"width": width, "height": 1000})
    for path in dict.fromkeys([*SHOWN.values(), "docs/agents/", "docs/reference/algorithms/"]):
        page.goto(address + path)
        expect(page.locator("article h1")).to_be_visible()
        assert page.evaluate(WIDE_TABLES) == [], path
        assert page.evaluate(BROKEN_KEYS) == [], path


def test_the_search_leads_to_a_key(page, address):
    page.goto(address)
    field = page.locator("input.md-search__input")
    field.click()
    field.press_sequentially("batch_size")
    found = page.locator(".md-search-result a[href*='/configuration/data/']")
    expect(found.nth(1)).to_have_attribute("href", re.compile("#bufferbatch_size$"))


def test_the_home_page_shows_a_run_and_where_each_visitor_begins(page, address):
    page.goto(address)
    picture = page.locator("article img[src$='real_run.png']")
    assert picture.evaluate("(image) => image.naturalWidth") > 1000
    rows = page.locator("article table").first.locator("tbody tr")
    expect(rows.locator("td:first-child")).to_have_text(
        ["an agent", "a trainer of TRL", "a GPU", "a cluster", "traffic"]
    )
    for row in rows.all():
        link = row.locator("a").first
        assert page.request.get(link.evaluate("(one) => one.href")).ok
    # Both are on the first screen, or begin there.
    assert rows.last.bounding_box()["y"] < picture.bounding_box()["y"] < 1000


def test_diagrams_are_pictures(page, address):
    for path, count in (("", 1), ("docs/serving/", 2)):
        page.goto(address + path)
        diagrams = page.locator("article img[src$='.svg']")
        expect(diagrams).to_have_count(count)
        for diagram in diagrams.all():
            assert (
                diagram.evaluate("(image) => image.decode().then(() => image.naturalWidth)") > 500
            )


def test_no_page_is_long(site):
    words = {}
    for file in site.rglob("*.html"):
        article = re.search(r"<article.*?</article>", file.read_text(encoding="utf-8"), re.DOTALL)
        if article:
            text = html.unescape(re.sub(r"<[^>]+>", " ", article[0].replace("<wbr>", "")))
            words[file.relative_to(site).parent.as_posix()] = len(text.split())
    assert len(words) > 60
    long = {name: count for name, count in words.items() if count > MOST_WORDS}
    assert long.keys() <= {Path(name).stem for name in LOGS}, f"split: {long}"
