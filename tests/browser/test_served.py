"""What a server did and decided, as the page of its run shows it, served and as a file."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.learning_parts import Server, config
from tuner.tools.viewer import write_report

TINY = "models/tiny_math"


async def served_for_a_while(root):
    """Sessions in every state, and the first new weights; the run's folder."""
    settings = config(TINY, root)
    async with Server(settings) as server:
        await server.have_sessions_in_every_state()
    return settings.run_dir


@pytest.fixture(scope="module")
def serving_run(tmp_path_factory):
    with ThreadPoolExecutor(1) as threads:  # Playwright's event loop is in this one
        root = tmp_path_factory.mktemp("served")
        return threads.submit(lambda: asyncio.run(served_for_a_while(root))).result()


@pytest.fixture(params=["served", "report"])
def link(request, serve, serving_run):
    return serve(serving_run) if request.param == "served" else write_report(serving_run).as_uri()


def test_sessions_are_counted_and_decisions_say_why(page, link):
    page.goto(link)
    section = page.locator("#served")
    section.wait_for()
    cards = section.locator(".card")
    counts = [row.split("\t") for row in cards.nth(0).locator("tr").all_inner_texts()]
    assert dict(counts[1:]) == {
        "open": "1",
        "ended": "3",
        "not judged": "2",
        "judged, not trained": "0",
        "trained": "2",
    }
    decisions = [row.split("\t") for row in cards.nth(1).locator("tr").all_inner_texts()]
    assert decisions[0] == ["time", "decision", "version", "compared with", "reason"]
    assert [row[1:3] for row in decisions[1:]] == [["promote", "1"], ["start", "0"]]
    assert all(row[4] for row in decisions[1:])
    scrolled = cards.nth(1).locator(".scroll")
    assert scrolled.evaluate("box => box.scrollWidth <= box.clientWidth"), "the why is cut off"


def test_a_run_that_served_nobody_has_no_such_section(page, report):
    page.goto(report)
    page.locator("#charts canvas, #charts svg").first.wait_for(state="attached")
    assert page.locator("#served").is_hidden()
