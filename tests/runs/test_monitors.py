"""What people get to see of a run, and the file that it goes on from."""

import io
import json
import re
from dataclasses import replace

from rich.console import Console

from tests.kit.builders import call, trace
from tuner.runs.console import ConsoleMonitor, JsonlMonitor
from tuner.traces import Outcome

METRICS = {
    "reward/mean": 0.5,
    "rollouts/timeout": 2,
    "eval/test/reward": 0.75,
    "eval/test/failed": 1,
    "calls/completion_tokens": 12.4,
    "tokens_per_second": 1000.0,
    "time/step": 30.0,
    "time/generation": 6.0,
    "time/agent": 1.0,
    "time/judge": 1.0,
    "time/training": 2.0,
}


def printed(total_steps, calls, *, terminal=False):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False)
    with ConsoleMonitor(total_steps, console) as monitor:
        for call in calls:
            call(monitor)
    return out.getvalue()


def said(message, *messages):
    return replace(
        call("c", [1], [2], [-1.0]),
        response={"role": "assistant", **message},
        messages=[{"role": "user", "content": "hi"}, *messages],
    )


def test_the_task_whose_reward_rose_most_is_shown_before_and_after_with_its_tools_results():
    asked = {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    answered = said({"content": "It is 3."}, asked, {"role": "tool", "content": "three"})
    before = [
        trace(0, 0, [said({"content": "no"})], reward=0.5, step=0),
        trace(1, 0, [said({"content": "what?"})], reward=0.0, step=0),
        trace(2, 0, [said({"content": "failed"})], step=0, outcome=Outcome.TIMEOUT),
    ]
    after = [
        trace(0, 0, [said({"content": "yes"})], reward=1.0, step=8),
        trace(1, 0, [said(asked), answered], reward=1.0, step=8),
        trace(2, 0, [said({"content": "now"})], reward=1.0, step=8),
    ]
    assert printed(8, [lambda m: m.before_and_after(before, after)]).splitlines() == [
        "the held-out task whose reward rose most:",
        "    task.question   task 1",
        "  before training, reward 0",
        "    model           what?",
        "  after training, reward 1",
        '    model           add({"a": 1})',
        "    tool result     three",
        "    model           It is 3.",
    ]


def test_nothing_is_shown_where_no_reward_rose():
    same = [trace(0, 0, [said({"content": "no"})], reward=1.0, step=step) for step in (0, 8)]
    assert printed(8, [lambda m: m.before_and_after(same[:1], same[1:])]) == ""


def test_a_step_is_plain_lines_of_at_most_100_columns_where_there_is_no_terminal():
    text = printed(
        5,
        [
            lambda m: m.begin("step 1", 4, step=1),
            lambda m: m.rollout_done(),
            lambda m: m.log(1, METRICS),
        ],
    )
    assert text.splitlines() == [
        "step 1/5  reward 0.500  held-out (test) 0.750  test: 1 failed  2 timeout  12 tokens/call",
        "    1000 tokens/s  30.0 s  2 min left",
    ]


def test_a_sentence_is_on_lines_of_at_most_100_columns():
    sentence = f"step 1: {' '.join(['word'] * 30)} (setting.of_the_sentence; raise it)"
    first, *more = printed(5, [lambda m: m.note(sentence)]).splitlines()
    assert len(more) == 1
    assert max(len(line) for line in (first, *more)) <= 100
    assert more[0].startswith("    word")
    assert f"{first} {more[0].strip()}" == sentence


def test_an_answer_without_text_that_was_cut_off_says_so():
    cut = replace(said({"content": ""}), finish_reason="length")
    shown = printed(5, [lambda m: m.samples([trace(0, 0, [cut], reward=0.0)], 1)])
    assert shown.endswith("    model           (no text; cut off)\n")


def test_a_step_of_recorded_rollouts_is_not_shown_as_if_it_were_new():
    replayed = {"reward/mean": 0.5, "calls/completion_tokens": 12.4, "time/step": 0.1}
    assert printed(5, [lambda m: m.log(1, replayed)]) == (
        "step 1/5  reward 0.500  (rollouts as recorded)\n"
    )


def test_a_terminal_shows_rollouts_and_time_left():
    text = printed(
        5,
        [
            lambda m: m.begin("step 1", 4, step=1),
            lambda m: m.log(1, METRICS),
            lambda m: m.begin("step 2", 4, step=2),
            lambda m: m.rollout_done(),
        ],
        terminal=True,
    )
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "step 2" in plain
    assert "1/4" in plain
    assert "left" in plain


def test_the_best_the_worst_and_one_between_are_shown_shortened():
    def rollout(n, reward, *responses):
        calls = [replace(call(f"{n}", [1], [2], [-1.0]), response=said) for said in responses]
        return trace(n, 0, calls, reward=reward)

    add = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    traces = [
        rollout(0, 0.5, {"content": "between\nlines"}),
        rollout(1, 0.0, *[{"content": f"call {n}"} for n in range(6)]),
        rollout(2, 1.0, {"content": None, "tool_calls": [add]}, {"content": "x" * 500}),
        rollout(3, 0.25, {"content": "in the middle"}),
        trace(4, 0, [], outcome=Outcome.TIMEOUT, error="late"),
    ]
    assert printed(5, [lambda m: m.samples(traces, 1)]).splitlines() == [
        "sample rollouts of step 1:",
        "  best, reward 1",
        "    task.question   task 2",
        '    model           add({"a": 1})',
        f"    model           {'x' * 77}...",
        "  middle, reward 0.25",
        "    task.question   task 3",
        "    model           in the middle",
        "  worst, reward 0",
        "    task.question   task 1",
        *(f"    model           call {n}" for n in range(4)),
        "                    ... 2 more calls",
    ]
    assert printed(5, [lambda m: m.samples(traces[-1:], 1)]) == ""


def test_the_answer_of_a_row_is_not_mistaken_for_the_question_or_for_the_models():
    row = {"question": "2 + 2?", "answer": "4"}
    made = replace(trace(0, 0, [said({"content": "It is 5."})], reward=0.0), task=row)
    assert printed(5, [lambda m: m.samples([made], 1)]).splitlines()[2:] == [
        "    task.question   2 + 2?",
        "    task.answer     4",
        "    model           It is 5.",
    ]


def test_tasks_that_begin_alike_are_shown_from_where_they_differ():
    alike = "State the final answer to the following arithmetic problem, and nothing else: "
    rows = [{"question": f"{alike}{n} + {n}"} for n in range(3)]
    traces = [
        replace(trace(n, 0, [said({"content": "0"})], reward=float(n)), task=row)
        for n, row in enumerate(rows)
    ]
    shown = printed(5, [lambda m: m.samples(traces, 1)])
    assert [line for line in shown.splitlines() if "question" in line] == [
        f"    task.question   State the final … {n} + {n}" for n in (2, 1, 0)
    ]


def test_evaluation_before_training_is_the_start_line():
    assert printed(5, [lambda m: m.log(0, {"eval/test/reward": 0.25, "time/step": 1.0})]) == (
        "before training: held-out reward (test) 0.250\n"
    )
    repeated = {"eval/test/reward": 0.25, "eval/test/pass_at_4": 0.5, "time/step": 1.0}
    assert printed(5, [lambda m: m.log(0, repeated)]) == (
        "before training: held-out reward (test) 0.250  test pass_at_4 0.500\n"
    )


def test_jsonl_starts_again_from_the_rows_of_the_interrupted_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    monitor = JsonlMonitor(path, [{"step": 1}])
    monitor.log(2, {"loss": 0.1})
    monitor.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2, "loss": 0.1},
    ]
