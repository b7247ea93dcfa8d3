"""The snippets of frameworks in docs/agents.md run as they are printed."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from pathlib import Path

import pytest

from tests.integration.frameworks.parts import ANSWER, CALL, FINAL, check_calls, scripted
from tests.pages import blocks
from tuner import WorkflowOutput
from tuner.rollouts.without_framework import PlainChatModel

THE_TOOL, *WORKFLOWS = blocks("agents.md", "python", "tests/integration/frameworks/test_docs.py")


@pytest.mark.parametrize("number", range(len(WORKFLOWS)))
async def test_a_snippet_runs_an_agent_on_the_model(number: int, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"  # a file, because smolagents reads the source of its tools
    script.write_text(f"{THE_TOOL}\n\n{WORKFLOWS[number]}", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("snippet", script)
    assert spec is not None
    assert spec.loader is not None
    snippet = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(snippet)
    has_final_tool = "smolagents" in WORKFLOWS[number]
    gateway = scripted(CALL, FINAL if has_final_tool else ANSWER)
    session = gateway.open_session("r")
    model = PlainChatModel(session)
    task = {"question": "2+40?"}
    try:
        if inspect.iscoroutinefunction(snippet.workflow):
            output = await snippet.workflow(task, model)
        else:
            output = await asyncio.to_thread(snippet.workflow, task, model)
        assert isinstance(output, WorkflowOutput)
        assert output.response == ("42" if has_final_tool else ANSWER)
        check_calls(gateway, session, 2)
        assert "42" in str(session.calls[1].messages[-1]["content"])
    finally:
        await gateway.aclose()


def test_every_framework_has_a_snippet() -> None:
    imported = [
        framework
        for snippet in WORKFLOWS
        for framework in ("agents", "langchain", "smolagents")
        if f"from {framework}" in snippet
    ]
    assert imported == ["agents", "langchain", "langchain", "smolagents"]
