"""Seconds until the page of a run with 100,000 traces is shown and answers, in Chromium.

The peer is what is allowed: 2 s until the first rows are shown, 0.2 s for a filter or a search. The
page is opened before anything is indexed, then with the index, and filters are chosen by turns; the
best of the repeats counts, as other work on the machine only adds to a time. Indexing is timed by
itself, while nobody looks.

    python benchmarks/viewer.py [--traces 100000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _report import Row, report
from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser.conftest import ARGUMENTS, Served, chromium
from tests.browser.many import WORDS, write_many
from tuner.tools.viewer.index import NAME, TraceIndex

VIEW_SECONDS, FILTER_SECONDS = 2.0, 0.2
# Notes when the text has changed and been painted, as a request for it from here would add to it.
SHOWN = """act => new Promise((done) => {
  const shown = document.getElementById("shown"), started = performance.now();
  new MutationObserver((_, observer) => {
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => done((performance.now() - started) / 1000)));
  }).observe(shown, { childList: true });
  const [name, value] = act, input = document.getElementById(`f-${name}`);
  input.value = value;
  input.dispatchEvent(new Event("input"));
})"""
# Of each repeat, so that no search is asked twice.
FILTERS: dict[str, tuple[str, Callable[[int], str]]] = {
    "filter: a step": ("step", lambda i: str(20 + i)),
    "filter: rewards from 1": ("low", lambda i: "1"),
    "search: a few answers": ("text", lambda i: f"In step {20 + i}:"),
    "search: a word of many": (
        "text",
        lambda i: f"{WORDS[i % len(WORDS)]} {i // len(WORDS) or ''}",
    ),
    "order: worst first": ("order", lambda i: "worst"),
    "order: most changed tasks": ("order", lambda i: "changed"),
}


def first_rows(page: Page, link: str) -> float:
    started = time.perf_counter()
    page.goto(link, wait_until="commit")
    page.locator("#list .row").first.wait_for()
    return time.perf_counter() - started


def filtered(page: Page, name: str, value: Callable[[int], str], repeat: int) -> float:
    """Seconds until one filter is answered."""
    # Leaves all in, and makes another question of it, of which the answer is not known yet.
    page.evaluate(SHOWN, ("high", str(100 + repeat)))
    seconds: float = page.evaluate(SHOWN, (name, value(repeat)))
    page.evaluate(SHOWN, (name, ""))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    case = f"{options.traces:,} traces"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = write_many(Path(folder) / "run", options.traces)
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 1000})

        def limited(metric: str, seconds: float, allowed: float) -> Row:
            return Row(case, metric, seconds, "allowed", allowed, 1.0, more_is_better=False)

        served = Served(run)
        rows = [limited("s to first rows, no index", first_rows(page, served.link), VIEW_SECONDS)]
        page.goto("about:blank")
        served.close()
        (run / "traces" / NAME).unlink()
        started = time.perf_counter()
        index = TraceIndex(run / "traces", keep=True)
        index.refresh()
        rows.append(Row(case, "s to index all", time.perf_counter() - started))
        started = time.perf_counter()
        index.count_branches()
        rows.append(Row(case, "s to count branches", time.perf_counter() - started))
        index.close()
        rows.append(Row(case, "MB of index", (run / "traces" / NAME).stat().st_size / 1e6))
        served = Served(run)
        again = [first_rows(page, served.link) for _ in range(options.repeats)]
        rows.append(limited("s to first rows, indexed", min(again), VIEW_SECONDS))
        for metric, (name, value) in FILTERS.items():
            taken = [filtered(page, name, value, i) for i in range(options.repeats)]
            rows.append(limited(f"s, {metric}", min(taken), FILTER_SECONDS))
        browser.close()
        served.close()
    report("viewer", rows, ("playwright", "starlette", "uvicorn"))


if __name__ == "__main__":
    main()
