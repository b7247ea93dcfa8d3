"""A template whose framework is missing ends in one sentence, before anything heavy is imported."""

import subprocess
import sys

import pytest

from tuner.templates import Template, create

# Neither importable nor in the metadata of what is installed.
HIDDEN = """
import runpy, sys
from importlib import metadata
hidden, script = sys.argv[1:]
sys.modules[hidden] = None
def version(name, real=metadata.version):
    if name == hidden:
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
try:
    runpy.run_path(script, run_name="__main__")
finally:
    print({"torch", "transformers"} & set(sys.modules))
"""


@pytest.mark.parametrize(
    ("template", "framework", "install"),
    [
        (Template.LANGGRAPH, "langchain", "pip install langchain langchain-openai"),
        (Template.REACT, "agentscope", "[agentscope1]"),
        (Template.REAL, "agentscope", "[agentscope1]"),
    ],
)
def test_a_missing_framework_ends_in_one_sentence(template, framework, install, tmp_path):
    create(template, tmp_path)
    command = [sys.executable, "-c", HIDDEN, framework, str(tmp_path / "main.py")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert install in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == "set()\n"
