"""What a server did and decided, as the page of its run shows it, served and as a file."""

import asyncio
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import expect

from tests.browser.example_run import TINY, agent
from tests.serving.learning_parts import Server, config
from tuner.serving.serving_store import ServingStore
from tuner.tools.viewer import write_report


async def served_for_a_while(root):
    """Sessions in every state, and the first new weights; the run's folder."""
    settings = config("models/tiny_math", root)
    async with Server(settings) as server:
        await server.have_sessions_in_every_state()
    return settings.run_dir


@pytest.fixture(scope="module")
def learning_run(tmp_path_factory):
    with ThreadPoolExecutor(1) as threads:  # Playwright's event loop is in this one
        root = tmp_path_factory.mktemp("served")
        return threads.submit(lambda: asyncio.run(served_for_a_while(root))).result()


def store_sessions(run):
    """What a server leaves that does not learn: an open session and two that ended, one judged."""
    run.mkdir()
    (run / "config.yaml").write_text(f"project: shop\nmodel: {{model_path: {TINY}}}\n")
    store = ServingStore(run / "serving.sqlite")
    for number, kind in enumerate(("plain", "whitespace", "reasoning"), 1):
        id_ = f"s-{number:024x}"
        store.open(id_, key=id_.encode(), seed=number, tags=["mobile"], opened=1_763_000_000.0)
        store.add_calls(id_, agent(random.Random(number), kind, number, 4))
    for number in (2, 3):
        store.end(f"s-{number:024x}", when=1_763_000_100.0)
    store.reward(f"s-{3:024x}", 0.25, feedback="too slow")
    return store


@pytest.fixture
def serving_run(tmp_path):
    store_sessions(tmp_path / "shop").close()
    return tmp_path / "shop"


@pytest.fixture(params=["served", "report"])
def opened(request, page, serve):
    """A function that opens the page of a run, served or as a file."""

    def opened(run):
        page.goto(serve(run) if request.param == "served" else write_report(run).as_uri())
        page.locator("#served").wait_for()

    return opened


def rows(table):
    return [row.split("\t") for row in table.locator("tr").all_inner_texts()]


def test_sessions_are_counted_by_state_and_decisions_say_why(page, opened, learning_run):
    opened(learning_run)
    cards = page.locator("#served .card")
    assert dict(rows(cards.nth(0))[1:]) == {
        "open": "1",
        "waiting for a reward": "1",
        "judged": "0",
        "trained": "2",
    }
    decisions = rows(cards.nth(1))
    assert decisions[0] == ["time", "decision", "version", "compared with", "reason"]
    assert [row[1:3] for row in decisions[1:]] == [["promote", "1"], ["start", "0"]]
    assert all(row[4] for row in decisions[1:])
    scrolled = cards.nth(1).locator(".scroll")
    assert scrolled.evaluate("box => box.scrollWidth <= box.clientWidth"), "the why is cut off"
    expect(page.locator("#metrics")).to_be_visible()
    cards.nth(0).get_by_role("button", name="trained").click()
    expect(page.locator("#shown")).to_have_text("2 of 4 traces")


def test_a_server_that_does_not_learn_shows_its_sessions_down_to_the_tokens(
    page, opened, serving_run
):
    opened(serving_run)
    expect(page.locator("#shown")).to_have_text("3 sessions")
    for absent in ("#metrics", "#totals", "#f-split", "#tasks"):
        expect(page.locator(absent)).to_be_hidden()
    listed = page.locator("#list .row")
    expect(listed).to_contain_text(["open", "waiting for a reward", "0.25judged"])
    page.locator("#served").get_by_role("button", name="waiting").click()
    expect(page.locator("#shown")).to_have_text("1 of 3 sessions")
    expect(listed).to_contain_text("Mia has 2 marbles and finds 4 more")
    page.get_by_role("button", name="clear").click()
    expect(page.locator("#shown")).to_have_text("3 sessions")
    page.locator("#f-text").fill("HAS 7 marbles")  # an answer
    expect(page.locator("#shown")).to_have_text("1 of 3 sessions")
    listed.first.click()
    detail = page.locator("#detail")
    expect(detail.locator("h3").first).to_have_text(f"Session s-{3:024x}")
    expect(detail.locator(".facts").first).to_contain_text("state judgedreward 0.25calls 2")
    expect(detail.locator(".facts").first).to_contain_text("tags mobile")
    expect(detail.locator(".call")).to_have_count(2)
    assert "Mia" in "".join(detail.locator(".call").nth(1).locator(".s").all_text_contents())
    expect(detail.get_by_role("button", name="side by side")).to_have_count(0)


def test_sessions_are_followed_while_the_server_serves(page, serve, tmp_path):
    store = store_sessions(tmp_path / "shop")
    page.goto(serve(tmp_path / "shop"))
    page.locator("#list .row", has_text="open").click()
    facts = page.locator("#detail .facts").first
    expect(facts).to_contain_text("state open")
    store.end(f"s-{1:024x}")
    store.reward(f"s-{1:024x}", 1.0)
    expect(facts).to_contain_text(re.compile("state judged.*reward 1"))
    expect(page.locator("#served tr", has_text="judged")).to_have_text("judged2")
    store.close()


def test_a_run_that_served_nobody_has_no_such_section(page, report):
    page.goto(report)
    page.locator("#charts canvas, #charts svg").first.wait_for(state="attached")
    assert page.locator("#served").is_hidden()
