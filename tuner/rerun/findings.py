"""What `tuner rerun` says: how far it came, what differs, what was sampled instead."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from tuner.functions.outputs import Rejected
from tuner.functions.places import raised_in
from tuner.gateway.request_diff import difference_of, difference_of_texts
from tuner.rerun.again import Rerun
from tuner.traces import Call

_STYLES = {"+": "green", "-": "red", "@": "cyan"}
_SHOWN = 200
"""Characters of an answer."""


def say(result: Rerun, console: Console) -> None:
    """Print what came of running a rollout again."""
    if result.reached:
        return console.print(_at_the_point(result))
    if result.sampled:
        for line in _calls(result):
            console.print(line, markup=False)
    if result.script.divergence is not None:
        _say_divergence(result, console)
        if not result.sampled:
            return None
    elif result.point is not None and not result.sampled and result.error is None:
        return console.print(
            f"{result.recorded.trace.id}: the agent ended without asking for call "
            f"{result.point + 1}"
        )
    if result.error is not None:
        return _say_error(result, console)
    if not result.sampled:
        count = len(result.calls)
        which = "the only call was" if count == 1 else f"all {count} calls were"
        console.print(f"{result.recorded.trace.id}: {which} given back, as recorded")
    return _say_answer(result, console)


def diff_text(lines: Sequence[str]) -> Text:
    """A unified diff in colours."""
    text = Text()
    for line in lines:
        bold = line.startswith(("+++", "---"))
        style = "bold" if bold else _STYLES.get(line[:1], "")
        text.append(f"{line}\n", style=style)
    return text


def _at_the_point(result: Rerun) -> str:
    trace, point = result.recorded.trace, result.point or 0
    return (
        f"{trace.id}: call {point + 1} of {len(trace.calls)} is asked for, as recorded; it ends "
        "here, before that is answered"
    )


def _say_divergence(result: Rerun, console: Console) -> None:
    trace, divergence = result.recorded.trace, result.script.divergence
    assert divergence is not None
    number = divergence.call if divergence.number is None else divergence.number
    count = len(trace.calls)
    at = f"call {number + 1} of {count}" if number < count else "its end"
    console.print(f"{trace.id} is left at {at}: {divergence.what}", markup=False)
    if result.error is not None and (place := raised_in(result.error)) is not None:
        console.print(f"asked for in {place}", markup=False)
    if lines := difference_of(divergence):
        console.print(diff_text(lines), end="")


def _say_error(result: Rerun, console: Console) -> None:
    error = result.error
    assert error is not None
    if not isinstance(error, Rejected):
        console.print("".join(traceback.format_exception(error)), end="", markup=False)
    what = "rejected the rollout" if isinstance(error, Rejected) else "failed"
    then = "as recorded" if result.same_answer else "which it did not then"
    if not result.same_answer and result.recorded.trace.error:
        then = f"and then it said: {result.recorded.trace.error}"
    console.print(f"{result.recorded.trace.id}: the workflow {what}, {then}", markup=False)


def _say_answer(result: Rerun, console: Console) -> None:
    trace = result.recorded.trace
    if result.same_answer:
        console.print(f"answer  {_short(trace.response)} as recorded", markup=False)
    elif result.sampled:
        console.print(f"answer  {_short(result.response or '')}", markup=False)
    else:
        console.print("answer  differs:")
        console.print(diff_text(difference_of_texts(trace.response, result.response or "")), end="")
    now, then = _number(result.reward), _number(trace.reward)
    if result.unjudged is not None:
        console.print(f"reward  not compared: {result.unjudged}", markup=False)
    elif result.reward == trace.reward:
        console.print(f"reward  {now} as recorded", markup=False)
    else:
        console.print(f"reward  {now}, recorded was {then}", markup=False)


def _calls(result: Rerun) -> Iterator[str]:
    """The calls of a rollout that was sampled on, a line each."""
    for number, call in enumerate(result.calls, 1):
        given, tokens = call.replayed, len(call.completion_ids)
        how = "given back" if given == tokens else f"sampled, {tokens - given} tokens"
        yield f"call {number}  {how}: {_said(call)}"


def _said(call: Call) -> str:
    names = [one["function"]["name"] for one in call.response.get("tool_calls") or ()]
    called = f" -> {', '.join(names)}" if names else ""
    return f"{_short(call.response.get('content') or '')}{called}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 4]} ...'"


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
