"""A real browser, and pages in it that fail the test when the page complains."""

import os
import shutil
import threading

import pytest
import uvicorn
from playwright.sync_api import sync_playwright

from tests.browser.example_run import write_example
from tuner.tools.viewer import write_report
from tuner.tools.viewer.web import _bind, viewer_app

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TOKEN = "token-of-the-test"
TIMEOUT_MS = 20_000


def chromium():
    """The browser's program.

    Raises:
        RuntimeError: There is none.
    """
    named = [os.environ[name] for name in ("TUNER_CHROMIUM",) if os.environ.get(name)]
    for name in named or NAMES:
        if path := shutil.which(name):
            return path
    looked = ", ".join(named or NAMES)
    raise RuntimeError(
        f"the browser tests need Chromium, and none was found ({looked}): install Debian's package "
        "chromium, or set TUNER_CHROMIUM to the program"
    )


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, serve):
    """A page; what it logs as an error, and any request but to its own server, fails the test.

    It asks its server again and again, so it is closed before the servers of `serve` are.
    """
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    complaints = []

    def check_console(message):
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def check_request(request):
        if not request.url.startswith(("http://127.0.0.1:", "file:", "data:")):
            complaints.append(f"request to {request.url}")

    page.on("console", check_console)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", check_request)
    yield page
    context.close()
    assert complaints == []


class Served:
    """The viewer's server in a thread, on a port of its own."""

    def __init__(self, run):
        config = uvicorn.Config(viewer_app(run, TOKEN), log_level="error")
        self._server = uvicorn.Server(config)
        self._listening = _bind(0)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listening]}
        )
        self._thread.start()
        self.link = f"http://127.0.0.1:{self._listening.getsockname()[1]}/{TOKEN}/"

    def close(self):
        self._server.should_exit = True
        self._thread.join()
        self._listening.close()


@pytest.fixture
def serve():
    """A function that serves a run and gives its link."""
    servers = []

    def serve(run):
        servers.append(Served(run))
        return servers[-1].link

    yield serve
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run to look at; tests that change a run make one of their own."""
    return write_example(tmp_path_factory.mktemp("runs") / "example")


@pytest.fixture(scope="session")
def report(run):
    """The link of its report."""
    return write_report(run).as_uri()


@pytest.fixture(params=["served", "report"])
def link(request, run):
    """The run as a served page and as a file: both must show the same."""
    if request.param == "served":
        return request.getfixturevalue("serve")(run)
    return request.getfixturevalue("report")
