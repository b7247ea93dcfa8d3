"""Each branch of a trace is named with its cause, whatever framework made it."""

import dataclasses

import pytest
from hypothesis import given

from tests.kit.builders import call
from tests.traces.agents import rollouts
from tuner.traces import Branch, BranchCause, TokenTree, branches

SYSTEM = {"role": "system", "content": "Solve it."}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def user(text):
    return {"role": "user", "content": text}


def said(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def using(id, arguments='{"a": 1}', content=None):
    function = {"name": "add", "arguments": arguments}
    return said(content, tool_calls=[{"id": id, "type": "function", "function": function}])


def result(id, text="2"):
    return {"role": "tool", "tool_call_id": id, "content": text}


class Recorder:
    """Makes a trace turn by turn; ids are new unless `after` or `like` says which call's."""

    def __init__(self):
        self.calls = []
        self._next = 0

    def _fresh(self, count):
        self._next += count
        return tuple(range(self._next - count, self._next))

    def ask(self, messages, response, *, after=None, like=None, tools=()):
        if like is not None:
            prompt = self.calls[like].prompt_ids
        elif after is not None:
            prompt = self.calls[after].prompt_ids + self.calls[after].completion_ids
            prompt += self._fresh(1)
        else:
            prompt = self._fresh(2)
        made = call(str(len(self.calls)), prompt, self._fresh(2), [-1.0, -1.0])
        made = dataclasses.replace(
            made, messages=list(messages), response=response, tools=list(tools)
        )
        self.calls.append(made)
        return [*messages, response]

    @property
    def found(self):
        return [
            (branch.call, branch.cause.value, branch.earlier) for branch in branches(self.calls)
        ]


@pytest.fixture
def trace():
    return Recorder()


def test_a_conversation_that_goes_on_has_no_branches(trace):
    history = trace.ask([SYSTEM, user("q")], using("c1"))
    history = trace.ask([*history, result("c1")], said("so"), after=0)
    trace.ask([*history, user("more")], said("done"), after=1)
    assert trace.found == []


def test_interleaved_sub_agents_branch_once_each(trace):
    main = trace.ask([SYSTEM, user("q")], said("one"))
    other = {"role": "system", "content": "Search."}
    sub = trace.ask([other, user("find")], said("found"))
    same_system = trace.ask([SYSTEM, user("another question")], said("x"))
    trace.ask([*main, user("go on")], said("two"), after=0)
    trace.ask([*sub, user("again")], said("found more"), after=1)
    trace.ask([*same_system, user("again")], said("y"), after=2)
    assert trace.found == [(1, "sub_agent", None), (2, "sub_agent", None)]


def test_the_same_prompt_again_is_resampled_and_either_answer_can_go_on(trace):
    for like in (None, 0, 0):
        trace.ask([user("q")], said("same text"), like=like)
    trace.ask([user("q"), said("same text"), user("more")], said("end"), after=1)
    assert trace.found == [(1, "resampled", 0), (2, "resampled", 0)]


def test_two_ways_on_from_one_call_are_a_fork(trace):
    history = trace.ask([user("q")], said("a"))
    trace.ask([*history, user("left")], said("b"), after=0)
    trace.ask([*history, user("right")], said("c"), after=0)
    assert trace.found == [(2, "fork", 0)]


@pytest.mark.parametrize(
    ("sent", "echoed", "cause"),
    [
        (said("4", reasoning_content="2+2"), said("4"), "reasoning"),
        (said("4", reasoning_content="2+2"), said("4", reasoning_content="2+2"), "reasoning"),
        (said("4", reasoning="2+2"), said("4"), "reasoning"),
        (said("4", reasoning_content=""), said("4"), "reasoning"),
        (said("<think>2+2</think>\n\n4"), said("4"), "reasoning"),
        (said("2+2</think>\n\n4"), said("2+2</think>\n\n4"), "reasoning"),
        (said("4 "), said("4"), "whitespace"),
        (said("a\n\n b", reasoning_content="r"), said("a b"), "whitespace"),
        (said("4"), said("4"), "template"),
        (said("4"), said([{"type": "text", "text": "4"}]), "template"),
        (using("c1", '{"a":1,"b":2}'), using("c1", '{"b": 2, "a": 1}', content=""), "template"),
        (using("c1"), using("call_9"), "tool_ids"),
        (said("4"), said("5"), "rewrite"),
        (using("c1"), using("c1", '{"a": 2}'), "rewrite"),
        (said("4"), user("not what I said"), "rewrite"),
    ],
)
def test_what_was_changed_in_an_answer_is_the_cause(trace, sent, echoed, cause):
    trace.ask([SYSTEM, user("q")], sent)
    trace.ask([SYSTEM, user("q"), echoed, user("more")], said("end"))
    assert trace.found == [(1, cause, 0)]


def test_a_later_answer_that_was_stripped_is_not_mistaken_for_a_fork(trace):
    history = trace.ask([user("q")], using("c1"))
    history = trace.ask([*history, result("c1")], said("long thought "), after=0)
    trace.ask([*history[:-1], said("long thought"), user("more")], said("end"), after=0)
    assert trace.found == [(2, "whitespace", 1)]


def test_a_later_answer_that_was_rewritten_is_not_mistaken_for_a_fork(trace):
    history = trace.ask([user("q")], using("c1"))
    history = trace.ask([*history, result("c1")], said("long thought"), after=0)
    trace.ask([*history[:-1], said("other thought"), user("more")], said("end"), after=0)
    assert trace.found == [(2, "rewrite", 1)]


def test_renamed_tool_calls_with_their_results(trace):
    trace.ask([user("q")], using("c1"))
    trace.ask([user("q"), using("c1"), result("c1")], said("so"), after=0)
    trace.ask([user("q"), using("call_1"), result("call_1"), said("so"), user("more")], said("end"))
    assert trace.found == [(2, "tool_ids", 1)]


def test_other_tools_with_the_same_history(trace):
    history = trace.ask([SYSTEM, user("q")], said("a"))
    trace.ask([*history, user("more")], said("b"), tools=TOOLS)
    trace.ask([SYSTEM, user("q")], said("a"), tools=TOOLS)
    assert trace.found == [(1, "tools_changed", 0), (2, "tools_changed", 0)]


def test_the_same_history_under_another_system_prompt(trace):
    history = trace.ask([SYSTEM, user("q")], said("a"))
    clock = {"role": "system", "content": "Solve it. It is 12:01."}
    trace.ask([clock, *history[1:], user("more")], said("b"))
    assert trace.found == [(1, "system_changed", 0)]


def test_two_agents_on_the_same_question_are_not_a_changed_system_prompt(trace):
    trace.ask([SYSTEM, user("q")], said("a"))
    trace.ask([{"role": "system", "content": "Criticise."}, user("q")], said("b"))
    assert trace.found == [(1, "sub_agent", None)]


def test_no_calls_have_no_branches():
    assert branches([]) == ()


def test_compaction_with_and_without_the_first_message(trace):
    history = trace.ask([SYSTEM, user("q")], using("c1"))
    history = trace.ask([*history, result("c1")], using("c2"), after=0)
    history = trace.ask([*history, result("c2", "7")], said("hm"), after=1)
    trace.ask([SYSTEM, user("q"), user("summary: 7"), user("go on")], said("x"))
    trace.ask([SYSTEM, user("summary"), *history[-2:], user("go on")], said("y"))
    assert trace.found == [(3, "compaction", 2), (4, "compaction", 2)]


def test_a_call_without_messages_is_counted_as_other(trace):
    trace.ask([], said("a"))
    trace.ask([], said("b"))
    trace.ask([SYSTEM], said("c"))
    assert trace.found == [(1, "other", None), (2, "other", None)]


@given(rollouts())
def test_there_is_at_most_one_row_more_than_branches(ids):
    calls = [call(str(i), c.prompt_ids, c.completion_ids, []) for i, c in enumerate(ids)]
    found = branches(calls)
    assert len(list(TokenTree.build(calls).rows())) <= 1 + len(found)
    assert all(isinstance(branch, Branch) for branch in found)
    for branch in found:
        earlier = calls[: branch.call]
        same_prompt = any(c.prompt_ids == calls[branch.call].prompt_ids for c in earlier)
        assert (branch.cause is BranchCause.RESAMPLED) == same_prompt
