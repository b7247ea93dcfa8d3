"""What the tests of all frameworks share: scripted answers, and what holds of every trace."""

from __future__ import annotations

import itertools

from tests.gateway import drift
from tuner.gateway import Gateway, Session
from tuner.traces import ReasoningPolicy, TokenTree, branches

# Letter by letter, as the tokenizer never would write it: text alone cannot bring the ids back.
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "42"}}\n</tool_call>'
REASONED = "<think>\nadd the user answer\n</think>\n\n"
ANSWER = "The answer is 42."
INSTRUCTIONS = "You are a calculator."


def scripted(*texts: str, reasoning: ReasoningPolicy = "template") -> Gateway:
    """A gateway whose model says `texts` in turn."""
    return drift.gateway_of(*(drift.letters(text) for text in texts), reasoning=reasoning)


def check_calls(gateway: Gateway, session: Session, count: int) -> None:
    """Every call is in the trace as it was sampled, and each sampled token once in the tree."""
    calls = session.calls
    engine = gateway.engine
    assert isinstance(engine, drift.Scripted)
    assert len(calls) == count
    assert session.errors == []
    assert all(call.invalid is None and not call.undelivered for call in calls)
    assert [call.prompt_ids for call in calls] == [ids for ids, _, _ in engine.requests]
    sampled = [engine.ids[min(i, len(engine.ids) - 1)] for i in range(count)]
    assert [call.completion_ids for call in calls] == sampled
    rows = TokenTree.build(calls).rows()
    assert sum(sum(row.samples > 0) for row in rows) == sum(len(c.completion_ids) for c in calls)


def check_one_path(gateway: Gateway, session: Session, count: int) -> None:
    """Every call continues the one before by its ids, and reads what the template renders."""
    check_continued(gateway, session, count)
    last = session.calls[-1]
    assert drift.decoded(last.prompt_ids) == drift.rendered(gateway, last)


def check_continued(gateway: Gateway, session: Session, count: int) -> None:
    """Every call continues the one before by its ids."""
    check_calls(gateway, session, count)
    calls = session.calls
    assert all(drift.continues(later, earlier) for earlier, later in itertools.pairwise(calls))
    assert branches(calls) == ()
    assert len(list(TokenTree.build(calls).rows())) == 1
