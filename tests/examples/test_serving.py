"""An agent in Python, curl and TypeScript: each opens a session at a real server and judges it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.server import ADMIN_KEY, served
from tuner import Client

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving"


def node() -> str | None:
    """A Node that leaves out types by itself: the one beside Playwright, or this machine's."""
    try:
        from playwright._impl._driver import compute_driver_executable

        return str(compute_driver_executable()[0])
    except ImportError:
        return shutil.which("node")


def needs(*programs):
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    with served(EXAMPLE / "config.yaml", f"checkpoint_root_dir={root}") as url:
        yield url


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "agent.py"], id="Python"),
        pytest.param(["sh", "agent.sh"], id="curl", marks=needs("curl", "jq")),
        pytest.param(
            [node(), "agent.mts"],
            id="TypeScript",
            marks=pytest.mark.skipif(node() is None, reason="node is not installed"),
        ),
    ],
)
def test_an_agent_opens_a_session_and_judges_it(command, url):
    environment = {**os.environ, "TUNER_URL": url, "TUNER_ADMIN_KEY": ADMIN_KEY}
    ended = subprocess.run(
        command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    id_, reward = ended.stdout.split()
    with Client(url, key=ADMIN_KEY) as client:
        info, (call,) = client.session(id_).info(), client.session(id_).calls()
    assert (info.state, info.judged, info.reward) == ("ended", True, float(reward))
    assert (info.tags, info.feedback) == (("example",), "compared with the known answer")
    assert call.messages[-1]["content"] == info.task["question"]
    assert (call.undelivered, call.redacted) == (False, False)
    assert float(reward) == float("8" in call.response["content"].split("####")[-1])
