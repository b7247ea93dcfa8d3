"""Six views of the page look as they did, in a light scheme and whatever the fonts."""

import pytest
from playwright.sync_api import expect

from tests.browser.example_run import write_example
from tests.browser.pictures import check_picture
from tests.browser.test_served import store_sessions


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of a project, of which the second was shorter, and a server."""
    folder = tmp_path_factory.mktemp("looks")
    write_example(folder / "marbles", completed=True)
    write_example(folder / "marbles-short", steps=6, completed=True)
    store_sessions(folder / "shop").close()
    return folder


def curves(page):
    expect(page.locator("#charts circle").first).to_be_visible()


def tasks(page):
    page.locator("#tasks > summary").click()
    expect(page.locator("#task-table .heat").first).to_be_visible()
    page.locator("#totals").evaluate("section => section.scrollIntoView()")


def compared(page):
    page.locator("#compare > summary").click()
    page.locator("#candidates input").first.check()
    expect(page.locator("#compared svg").first).to_be_visible()
    page.locator("#compare").evaluate("details => details.scrollIntoView()")


def trace(page):
    page.locator("#list .row", has_text="1-0-3").click()
    expect(page.locator("#detail .branch")).to_be_visible()
    page.locator("#traces").evaluate("section => section.scrollIntoView()")


def before_and_after(page):
    page.locator("#list .row", has_text="1-0-0").click()
    page.get_by_role("button", name="side by side").click()
    expect(page.locator(".pair .call")).to_have_count(4)
    page.locator("#traces").evaluate("section => section.scrollIntoView()")


def sessions(page):
    page.locator("#list .row", has_text="judged").click()
    expect(page.locator("#detail .call")).to_have_count(2)


VIEWS = [curves, tasks, compared, trace, before_and_after, sessions]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_it_looks_as_it_did(view, page, serve, runs, tmp_path):
    page.goto(serve(runs / ("shop" if view is sessions else "marbles")))
    expect(page.locator("#shown")).to_contain_text("sessions" if view is sessions else "traces")
    view(page)
    check_picture(page, f"run_{view.__name__}", tmp_path)
