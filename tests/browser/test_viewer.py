"""The page of a run in a real browser, served and as report.html."""

import dataclasses
import json
import re
import time

import pytest
from playwright.sync_api import expect

from tests.browser.example_run import HOSTILE, example_trace, write_example
from tuner.traces import Outcome, RolloutId, TraceStore
from tuner.viewer import RunReader
from tuner.viewer.page import page as html_of
from tuner.viewer.page import report_data

TRACES = 12 * 4 * 4
# How soon a page with ten thousand traces must list them, and answer a filter. On a machine with
# two cores it takes about a third of that.
MANY = 10_000
LIST_SECONDS = 30.0
FILTER_SECONDS = 3.0


def card(page, title):
    return page.locator(".card", has=page.get_by_role("heading", name=title, exact=True))


def open_trace(page, name):
    page.locator("#list .row", has_text=re.compile(f"^{name}")).first.click()
    expect(page.locator("#detail h3").first).to_contain_text("rollout")


def choose(page, filter, value):
    page.locator(f"#f-{filter}").select_option(value)


def shown(page):
    return page.locator("#list .row")


def test_curves_outcomes_and_the_split_of_time_are_drawn(page, link):
    page.goto(link)
    reward = card(page, "Training reward, mean")
    expect(reward.locator("path.line")).to_have_attribute("d", re.compile(r"^M.+(L.+){11}$"))
    assert reward.locator("path.line").bounding_box()["width"] > 200
    expect(card(page, "Held-out reward (test)").locator("circle")).to_have_count(3)
    time_split = card(page, "Time per step")
    expect(time_split.locator("rect")).to_have_count(12 * 4)
    expect(time_split.locator(".legend")).to_have_text("generationagentjudgetrainingsync")
    parts = time_split.locator(".legend i")
    colours = parts.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) == len(colours) == 5
    expect(page.locator("#outcomes")).to_have_text("completed180timeout12")
    expect(page.locator("#balance")).to_have_text("12,000 sampled = 11,520 trained + 480 timeout")
    box = reward.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 40)
    expect(page.locator("#tip")).to_contain_text("step 12")


def test_a_trace_opens_as_a_conversation_with_tools_and_reward(page, link):
    page.goto(link)
    open_trace(page, "1-0-0")
    detail = page.locator("#detail")
    expect(detail.locator(".facts").first).to_contain_text("outcome completed")
    expect(detail.locator(".facts").first).to_contain_text("reward")
    first, second = detail.locator(".call").nth(0), detail.locator(".call").nth(1)
    expect(first.locator(".message.user")).to_contain_text("Mia has 2 marbles and finds 4 more")
    expect(first.locator(".message.answer .tool-call")).to_have_text(
        'calls add (c1)\n{\n  "a": 2,\n  "b": 4\n}'
    )
    expect(first.get_by_text("1 tools offered: add")).to_be_visible()
    # What an earlier call had is folded away; the result of the tool is new.
    expect(second.get_by_text("3 messages as in call 1")).to_be_visible()
    expect(second.locator(".message.tool")).to_contain_text("6")
    expect(second.locator(".message.answer")).to_contain_text("Mia has 6 marbles.")
    expect(detail.locator(".branch")).to_have_count(0)


def test_branches_are_shown_at_their_call_with_the_cause(page, link):
    page.goto(link)
    open_trace(page, "1-0-3")
    branch = page.locator("#detail .call").nth(1).locator(".branch")
    expect(branch).to_contain_text("Branch: reasoning left out.")
    expect(branch).to_contain_text("sent back without its reasoning")
    expect(branch).to_contain_text(re.compile(r"Compared with call 1: 1\d\d of the 2\d\d prompt"))
    expect(page.locator("#detail .branch")).to_have_count(1)
    open_trace(page, "1-1-1")
    branch = page.locator("#detail .call").nth(1).locator(".branch")
    expect(branch).to_have_attribute("data-cause", "sub_agent")
    expect(branch).to_contain_text("Branch: new conversation.")
    expect(page.locator("#detail .branch")).to_have_count(1)


def test_branches_are_counted_by_cause_and_chosen_by_it(page, link):
    page.goto(link)
    causes = page.locator("#causes")
    expect(causes).to_have_text(
        "reasoning left out48new conversation24other tools offered24whitespace changed24"
    )
    expect(page.locator("#branched")).to_have_text(f"120 branches in {TRACES} traces")
    causes.get_by_role("button", name="other tools offered").click()
    expect(page.locator("#shown")).to_have_text(f"24 of {TRACES} traces")
    shown(page).first.click()
    expect(page.locator("#detail .branch")).to_have_attribute("data-cause", "tools_changed")
    choose(page, "cause", "none")
    expect(page.locator("#shown")).to_have_text(f"72 of {TRACES} traces")
    choose(page, "outcome", "timeout")
    choose(page, "cause", "")
    expect(page.locator("#shown")).to_have_text(f"12 of {TRACES} traces")


def test_tokens_are_coloured_by_probability_and_say_it_on_hover(page, link, run):
    trace = TraceStore(run / "traces").read("train", 1)[0]
    call = trace.calls[0]
    page.goto(link)
    open_trace(page, "1-0-0")
    tokens = page.locator("#detail .call").first.locator(".tokens")
    sampled, prompt = tokens.locator("span.s"), tokens.locator("span.prompt")
    expect(sampled).to_have_count(len(call.completion_ids))
    expect(prompt).to_have_count(60)
    tokens.get_by_role("button").click()
    expect(prompt).to_have_count(len(call.prompt_ids))
    likely = max(range(len(call.logprobs)), key=lambda i: call.logprobs[i])
    unlikely = min(range(len(call.logprobs)), key=lambda i: call.logprobs[i])

    def colour(node):
        return node.evaluate("node => getComputedStyle(node).backgroundColor")

    colours = {colour(sampled.nth(likely)), colour(sampled.nth(unlikely)), colour(prompt.first)}
    assert len(colours) == 3
    for position in (likely, unlikely):
        sampled.nth(position).hover()
        tip = page.locator("#tip")
        expect(tip).to_contain_text(f"id {call.completion_ids[position]}")
        expect(tip).to_contain_text(f"log-prob {call.logprobs[position]:.4f}")
        expect(tip).to_contain_text("weights version 3")
    prompt.last.hover()
    expect(page.locator("#tip")).to_contain_text("read, not trained")
    text = "".join(sampled.all_text_contents())
    assert text.startswith(" Let me add. <tool_call>")


def test_a_run_that_goes_on_is_followed_without_a_reload(page, serve, tmp_path):
    run = write_example(tmp_path / "run", steps=1)
    page.goto(serve(run))
    expect(page.locator("#shown")).to_have_text("16 traces")
    expect(page.locator("#updated")).to_have_text(re.compile(r"last write \d+ s ago"))
    page.evaluate("window.notReloaded = true")
    TraceStore(run / "traces").append(example_trace(2, 0, 0, "plain", reward=0.25))
    TraceStore(run / "traces").append(example_trace(2, 0, 1, "reasoning", reward=0.75))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "reward/mean": 0.5}) + "\n")
    page.wait_for_selector("#list .row:has-text('2-0-1')")
    expect(page.locator("#steps")).to_have_text("step 2 of 20")
    expect(card(page, "Training reward, mean").locator("circle")).to_have_count(2)
    expect(page.locator("#branched")).to_have_text("11 branches in 18 traces")
    open_trace(page, "2-0-1")
    expect(page.locator("#detail .branch")).to_have_attribute("data-cause", "reasoning")
    assert page.evaluate("window.notReloaded")


def test_ten_thousand_traces_are_listed_filtered_and_scrolled(page, serve, tmp_path):
    run = write_example(tmp_path / "run", steps=1)
    line = (run / "traces/step_000001.jsonl").read_bytes().splitlines()[3]
    traces = run / "traces"
    for step in range(1, 101):
        head = b'"step": %d, "task": 7, "rollout": %d,'
        numbered = [
            line.replace(b'"step": 1, "task": 0, "rollout": 3,', head % (step, i))
            for i in range(MANY // 100)
        ]
        (traces / f"step_{step:06d}.jsonl").write_bytes(b"\n".join(numbered) + b"\n")
    started = time.monotonic()
    page.goto(serve(run))
    shown(page).first.wait_for()
    page.locator("#shown", has_text=re.compile("^10,000 traces$")).wait_for(
        timeout=1000 * LIST_SECONDS
    )
    assert time.monotonic() - started < LIST_SECONDS
    # The causes are still being counted; the page is usable meanwhile.
    started = time.monotonic()
    choose(page, "step", "77")
    page.locator("#shown", has_text="100 of 10,000 traces").wait_for()
    open_trace(page, "77-7-0")
    expect(page.locator("#detail .branch")).to_have_count(1)
    assert time.monotonic() - started < FILTER_SECONDS
    page.get_by_role("button", name="clear").click()
    assert shown(page).count() < 100  # only those in view are in the document
    page.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    expect(shown(page).last).to_contain_text("100-7-99")
    page.locator("#list").focus()
    page.keyboard.press("End")
    expect(page.locator("#detail h3").first).to_contain_text("step 100, task 7, rollout 99")
    page.locator("#branched", has_text="10,000 branches in 10,000 traces").wait_for(timeout=120_000)
    choose(page, "cause", "reasoning")
    expect(page.locator("#shown")).to_have_text("10,000 traces")


@pytest.fixture(params=["served", "report"])
def hostile_link(request, tmp_path, serve):
    run = write_example(tmp_path / "run", steps=1, tasks=1, rollouts=1)
    trace = example_trace(2, 0, 0, "plain", error=HOSTILE, outcome=Outcome.JUDGE_ERROR)
    messages = [{"role": HOSTILE, "name": HOSTILE, "content": HOSTILE, HOSTILE: HOSTILE}]
    function = {"name": HOSTILE, "arguments": HOSTILE, "description": HOSTILE}
    response = {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE}
    response["tool_calls"] = [{"id": HOSTILE, "type": "function", "function": function}]
    call = dataclasses.replace(
        trace.calls[0],
        messages=messages,
        tools=[{"type": "function", "function": function}],
        response=response,
        invalid=HOSTILE,
    )
    trace = dataclasses.replace(
        trace, calls=(call,), metrics={HOSTILE: 1.0}, response=HOSTILE, task={HOSTILE: HOSTILE}
    )
    trace = dataclasses.replace(trace, id=RolloutId(2, 0, 0))
    TraceStore(run / "traces").append(trace)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, f"eval/{HOSTILE}/reward": 1, HOSTILE: 2}) + "\n")
    if request.param == "served":
        return serve(run)
    data = report_data(RunReader(run), trace_bytes=2**20, stopped=HOSTILE)
    (tmp_path / "report.html").write_text(html_of(data), encoding="utf-8")
    return (tmp_path / "report.html").as_uri()


def test_what_models_and_tools_wrote_is_text_and_nothing_runs(page, hostile_link):
    page.goto(hostile_link)
    open_trace(page, "2-0-0")
    page.locator("#others > summary").click()
    for summary in page.locator("#detail details > summary").all():
        summary.click()
    expect(page.locator("#detail .message .text", has_text="<img").first).to_be_visible()
    expect(page.locator("#detail .note.bad", has_text="Not trained: </script>")).to_be_visible()
    assert page.locator("#detail").inner_text().count(HOSTILE) >= 10
    assert page.locator("img, iframe, object").count() == 0
    assert page.locator("script").count() == 2
    assert page.evaluate("window.pwned") is None


def test_a_stopped_run_says_why_and_fields_of_a_call_are_shown_when_present(page, run, tmp_path):
    data = report_data(RunReader(run), trace_bytes=2**20, stopped="TrainingError: no signal")
    body = data["bodies"]["step_000001.jsonl:0"]
    body["trace"]["calls"][0] |= {"role": "solver", "reward": 0.125, "kept_reasoning_ids": 17}
    body["trace"]["calls"][1] |= {"undelivered": True, "dialect": "responses"}
    (tmp_path / "report.html").write_text(html_of(data), encoding="utf-8")
    page.goto((tmp_path / "report.html").as_uri())
    expect(page.locator("#status")).to_have_text("stopped")
    expect(page.locator("#notes")).to_contain_text("before its end: TrainingError: no signal")
    open_trace(page, "1-0-0")
    first, second = page.locator("#detail .call").nth(0), page.locator("#detail .call").nth(1)
    expect(first.locator("h3")).to_have_text("call 1 of 2 · solver")
    expect(first.locator(".facts")).to_contain_text("reward of the call 0.125")
    expect(first.locator(".facts")).to_contain_text("reasoning kept in the prompt 17 tokens")
    expect(second.locator(".facts")).to_contain_text("dialect responses")
    expect(second.locator(".note.bad")).to_contain_text("the agent did not get this answer")
    expect(second.locator(".tokens")).to_have_class(re.compile("untrained"))


def test_traces_of_the_first_format_are_shown_too(page, serve, tmp_path, run):
    from tuner.traces.plain import to_plain

    old = write_example(tmp_path / "run", steps=1)
    path = old / "traces/step_000001.jsonl"
    traces = TraceStore(old / "traces").read("train", 1)
    path.write_text("".join(json.dumps(to_plain(trace)) + "\n" for trace in traces))
    page.goto(serve(old))
    expect(page.locator("#branched")).to_have_text("10 branches in 16 traces")
    open_trace(page, "1-0-3")
    expect(page.locator("#detail .branch")).to_have_attribute("data-cause", "reasoning")
