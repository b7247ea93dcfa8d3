"""The code of docs/serving.md, as it stands, at a real server."""

import json
import os
import shutil
import subprocess

import pytest

from tests.kit import forked
from tests.pages import ROOT, blocks
from tests.serving.server import ADMIN_KEY, served
from tuner import Client


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    with served(ROOT / "examples/serving/config.yaml", f"checkpoint_root_dir={root}") as url:
        yield url


@pytest.fixture
def environment(url):
    return {"TUNER_URL": url, "TUNER_ADMIN_KEY": ADMIN_KEY, "MODEL": "tiny_math"}


@pytest.mark.long
def test_the_five_minutes(environment, url, tmp_path):
    (script,) = blocks("serving.md", "python")
    (tmp_path / "main.py").write_text(script)
    printed = forked.script(tmp_path / "main.py", environment=environment)
    id_, calls, tokens, reward = printed.split()
    assert (calls, reward) == ("1", "1.0")
    with Client(url, key=ADMIN_KEY) as client:
        info = client.session(id_).info()
    assert (info.state, info.feedback, info.sampled_tokens) == ("open", "thumb", int(tokens))


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_the_same_with_curl(environment):
    (script,) = blocks("serving.md", "bash", "tests/serving/test_page.py")
    ended = subprocess.run(
        ["bash", "-euc", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    completion, judged, sealed = map(json.loads, json_lines(ended.stdout))
    assert completion["object"] == "chat.completion"
    assert (judged["reward"], judged["feedback"]) == (1.0, "thumb")
    assert sealed["state"] == "ended"


def json_lines(text):
    """The objects that stand one behind the other."""
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        _, end = decoder.raw_decode(text)
        found.append(text[:end])
        text = text[end:]
    return found
