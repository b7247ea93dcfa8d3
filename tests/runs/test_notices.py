"""What is said of steps that cost signal, and the rule by which a run ends."""

import math
from dataclasses import replace

import pytest

from tests.kit.builders import call, trace
from tests.runs.test_metrics import failed, group
from tuner.config.load import load_config
from tuner.runs.notices import (
    CallSettings,
    Notices,
    SignalHistory,
    call_findings,
    diagnosis,
    quiet_warning,
    untrained,
)

SETTINGS = CallSettings(context=100, answer=8, parser="hermes")


def calls(count, *, cut=0, malformed=0, prompt=2, limit=8, content="ho"):
    """Rollouts of a call each; the first `cut` are cut off, the last `malformed` unreadable."""
    made = [call(str(n), range(1, prompt + 1), range(1, 9), [-1.0] * 8) for n in range(count)]
    return [
        trace(
            0,
            n,
            [
                replace(
                    one,
                    sampling=replace(one.sampling, max_tokens=limit),
                    finish_reason="length" if n < cut else "stop",
                    malformed_tool_calls=int(n >= count - malformed),
                    response={"role": "assistant", "content": content},
                )
            ],
            reward=float(n),
        )
        for n, one in enumerate(made)
    ]


def said(found):
    return [one.sentence for one in found]


def test_diagnosis_names_the_most_frequent_failure():
    text = diagnosis([failed(0, 0), failed(0, 1), failed(1, 0, "OSError: gone")], 3)
    assert "3 of 3 rollouts" in text
    assert "(2 times) with workflow_error: KeyError: 'x'" in text


def test_diagnosis_of_equal_rewards_says_what_most_calls_have_in_common():
    def of(cut, malformed):
        calls = [
            replace(
                call(f"{n}", [1, 2], [3], [-1.0]),
                finish_reason="length" if n < cut else "stop",
                malformed_tool_calls=int(n < malformed),
            )
            for n in range(4)
        ]
        return diagnosis([trace(0, n, [c], reward=0.0) for n, c in enumerate(calls)], 3)

    assert "4 of 4 calls were cut off at the token limit (model.max_response_tokens" in of(4, 0)
    assert "3 of 4 calls contain unreadable tool calls" in of(0, 3)
    assert "cut off at the token limit" not in of(2, 4)
    assert "Besides" not in of(0, 0)


def test_diagnosis_of_equal_rewards_says_what_to_change():
    assert "the same reward, 0:" in diagnosis(group(0, [0.0, 0.0]), 3)
    assert "repeat_times" in diagnosis([*group(0, [0.0, 0.0]), *group(1, [1.0, 1.0])], 3)


def test_diagnosis_says_why_calls_with_rewards_could_not_be_trained():
    row = {"tokens/trained": 0, "tokens/dropped/greedy_call": 12, "rollouts/completed": 2}
    text = diagnosis(group(0, [0.0, 1.0]), 3, reasons=untrained(row))
    assert "No call of the last step could be trained" in text
    assert "(12 greedy_call)" in text


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ({"cut": 3}, "at the token limit (model.max_response_tokens, 8; raise it)"),
        ({"cut": 3, "limit": 5}, "at 5 tokens (the request's own max_tokens"),
        ({"cut": 3, "prompt": 92}, "the context (model.max_model_len, 100 tokens"),
    ],
)
def test_calls_that_were_cut_off_are_counted_with_the_setting_that_cut_them(made, named):
    [sentence] = said(call_findings(calls(4, **made), SETTINGS))
    assert sentence.startswith("3 of 4 calls were cut off")
    assert named in sentence


def test_the_limit_of_a_task_set_is_named_where_it_has_one():
    own = load_config(overrides=["buffer.explorer_input.taskset.rollout_args.max_tokens=8"])
    [sentence] = said(call_findings(calls(4, cut=3), CallSettings.of(own, 100)))
    assert "(buffer.explorer_input.taskset.rollout_args.max_tokens, 8; raise it)" in sentence


def test_tool_calls_that_cannot_be_read_are_shown_with_the_parser():
    [sentence] = said(
        call_findings(calls(4, malformed=2, content="x" * 200 + '<tool_call>{"name"'), SETTINGS)
    )
    assert sentence.startswith("2 of 4 calls contain unreadable tool calls, such as '...xxx")
    assert """<tool_call>{"name"' (explorer.rollout_model.tool_call_parser must""" in sentence
    assert sentence.endswith("it is hermes)")


def test_a_tool_call_that_was_cut_off_is_no_matter_of_the_parser():
    [sentence] = said(call_findings(calls(2, cut=2, malformed=2), SETTINGS))
    assert "cut off" in sentence


def test_a_notice_comes_when_its_share_crosses_a_level_and_not_again_for_a_wobble():
    notices = Notices(SETTINGS, compared=False)
    shares = [0, 1, 2, 3, 1, 3, 5, 4, 5, 2, 0, 1, 2]  # of ten calls
    said = [
        bool(notices.of(step, calls(10, cut=cut), SignalHistory()))
        for step, cut in enumerate(shares)
    ]
    assert [step for step, due in enumerate(said) if due] == [2, 6, 12]


def tools(name, result=None, *, count=1, offered="add"):
    """Rollouts with a call of a tool each, and its result."""
    made = {"id": "t", "function": {"name": name, "arguments": "{}"}}
    asked = replace(
        call("a", [1], [2], [-1.0]),
        response={"role": "assistant", "content": None, "tool_calls": [made]},
        tools=[{"type": "function", "function": {"name": offered}}],
    )
    given = {"role": "tool", "tool_call_id": "t", "content": result or "3"}
    ended = replace(asked, id="b", messages=[given], response={"role": "assistant", "content": "3"})
    return [trace(1, n, [asked, ended], reward=0.0) for n in range(count)]


def test_tools_that_fail_and_tools_that_were_not_offered_are_counted_with_an_example():
    traces = [*tools("add", count=6), *tools("sum"), *tools("add", "Error: no number", count=3)]
    unlike = [replace(one, id=replace(one.id, rollout=n)) for n, one in enumerate(traces)]
    notices = Notices(SETTINGS, compared=False)
    assert notices.of(1, unlike, SignalHistory()) == [
        "step 1: tool (not offered): 1 call, 100% failed",
        "step 1: tool add: 9 calls, 33% failed",
        "step 1: 1 of 10 tool calls are of tools that the request does not offer, most often "
        "'sum'; it offers add: name them in the system prompt",
        "step 1: 3 of 9 tool calls failed, most often (3 times) add: Error: no number",
    ]
    assert notices.of(2, unlike, SignalHistory()) == []


def test_each_roles_reward_and_share_of_calls_that_were_cut_off_are_shown_after_the_first_step():
    made = [
        replace(one, calls=(replace(one.calls[0], role=role),))
        for one, role in zip(calls(4, cut=1), ("critic", "writer") * 2, strict=True)
    ]
    notices = Notices(SETTINGS, compared=False)
    assert notices.of(1, made, SignalHistory())[:2] == [
        "step 1: role critic: 2 calls, reward 1.000, 50% cut off",
        "step 1: role writer: 2 calls, reward 2.000, 0% cut off",
    ]
    assert not any("role" in line for line in notices.of(2, made, SignalHistory()))


def history(*rows):
    found = SignalHistory()
    for row in rows:
        found = found.after(row)
    return found


def test_groups_without_a_difference_are_counted_unless_they_are_solved():
    notices = Notices(SETTINGS, compared=True)
    known = history(row(0, 1, signal=1))
    solved = [t for task in range(4) for t in group(task, [1.0, 1.0])]
    assert notices.of(1, solved, known) == []
    alike = [t for task in range(4) for t in group(task, [0.0, 0.0])]
    [sentence] = notices.of(2, [*alike, *group(4, [0.0, 1.0])], known)
    assert sentence.startswith("step 2: in 4 of 5 groups all rollouts have the same reward, most")
    assert "most often 0: training uses the differences" in sentence
    assert Notices(SETTINGS, compared=False).of(1, alike, known) == []


def test_groups_are_not_counted_where_calls_have_rewards_of_their_own():
    own = [
        replace(one, calls=tuple(replace(call, reward=1.0) for call in one.calls))
        for one in group(0, [0.0, 0.0])
    ]
    assert Notices(SETTINGS, compared=True).of(1, own, SignalHistory()) == []


# The rule by which a run ends.


def row(least, most, *, signal=0, completed=4, **more):
    rewards = {"reward/mean": (least + most) / 2, "reward/min": least, "reward/max": most}
    return {"signal": signal, "rollouts/completed": completed, **rewards, **more}


LEARNED, SOLVED = row(0, 1, signal=1), row(1, 1)


def test_steps_that_all_have_the_highest_reward_complete_a_run():
    assert history(LEARNED, SOLVED).nothing_left(2) is None
    assert "of 2 steps in a row had the highest reward, 1" in history(
        LEARNED, SOLVED, {"eval/x/reward": 0.0}, SOLVED
    ).nothing_left(2)


@pytest.mark.parametrize(
    "rows",
    [
        [SOLVED, SOLVED],  # nothing was learned, and it may be the lowest
        [row(0, 1), SOLVED, SOLVED],  # between groups alone
        [row(1, 1, signal=1), SOLVED, SOLVED],  # of calls alone, and it may be the lowest
        [LEARNED, row(0, 0), row(0, 0)],
        [LEARNED, row(0.5, 0.5), row(0.5, 0.5)],
        [row(0, 2, signal=1), SOLVED, SOLVED],
        [LEARNED, SOLVED, row(2, 2)],  # the highest is new
        [LEARNED, SOLVED, row(1, 1, signal=1)],  # calls have rewards of their own
        [LEARNED, SOLVED, row(1, 1, **{"rollouts/timeout": 1})],
        [LEARNED, SOLVED, row(1, 1, **{"tokens/trained": 0, "tokens/dropped/greedy_call": 3})],
        [LEARNED, SOLVED, row(1, 1, **{"tasks/seen": 0.9})],  # others may be harder
        [{"signal": 1, "reward/mean": 0.5}, LEARNED, SOLVED, SOLVED],  # of an earlier version
    ],
)
def test_a_run_is_not_complete_where_something_may_be_left_to_learn(rows):
    assert history(*rows).nothing_left(2) is None


def test_groups_that_are_left_out_for_equal_rewards_break_nothing():
    dropped = {"tokens/trained": 0, "tokens/dropped/equal_rewards": 9}
    assert history(LEARNED, row(1, 1, **dropped)).broken == 0
    assert history(LEARNED, row(1, 1, **dropped), row(1, 1, **dropped)).nothing_left(2)


def test_a_step_is_broken_where_most_rollouts_failed_or_no_call_could_be_trained():
    failed = row(1, 1, completed=1, **{"rollouts/workflow_error": 2})
    greedy = row(1, 1, **{"tokens/trained": 0, "tokens/dropped/greedy_call": 9})
    assert history(LEARNED, failed, greedy).broken == 2
    assert history(LEARNED, failed, greedy, SOLVED).broken == 0
    assert history(LEARNED, failed, greedy, SOLVED).quiet == 3


def test_of_an_earlier_version_the_highest_reward_is_not_known():
    assert history({"signal": 1, "reward/mean": 0.5}).highest == math.inf


def test_the_warning_names_the_share_of_equal_groups_and_what_to_do():
    text = quiet_warning([*group(0, [1.0, 1.0]), failed(0, 2)], 9, 3, SETTINGS)
    assert "step 9: 3 steps in a row gave nothing to learn from: in 1 of 1 groups" in text
    assert "Raising algorithm.repeat_times or model.temperature" in text
