"""The page of a run in a real browser, served and as report.html."""

import dataclasses
import json
import re
import time

import pytest
from playwright.sync_api import expect

from tests.browser.example_run import HOSTILE, example_trace, write_example
from tests.browser.many import write_many
from tuner.tools.viewer import RunReader
from tuner.tools.viewer.index import TraceIndex
from tuner.tools.viewer.page import page as html_of
from tuner.tools.viewer.page import report_data
from tuner.traces import Outcome, RolloutId, TraceStore

TRACES = 12 * 4 * 4
# How soon a page with a hundred thousand traces must be there, and answer a filter: many times what
# `benchmarks/viewer.py` asks for on a machine that does nothing else.
MANY = 100_000
VIEW_SECONDS = 15.0
FILTER_SECONDS = 3.0
WAIT_SECONDS = 300.0


def card(page, title):
    return page.locator(".card", has=page.get_by_role("heading", name=title, exact=True))


def open_trace(page, name):
    page.locator("#list .row", has_text=re.compile(f"^{name}")).first.click()
    expect(page.locator("#detail h3").first).to_contain_text("rollout")


def choose(page, filter, value):
    page.locator(f"#f-{filter}").select_option(value)


def shown(page):
    return page.locator("#list .row")


def test_curves_outcomes_and_the_split_of_time_are_drawn(page, link, run):
    page.goto(link)
    reward = card(page, "Training reward, mean")
    expect(reward.locator("path.line")).to_have_attribute("d", re.compile(r"^M.+(L.+){11}$"))
    assert reward.locator("path.line").bounding_box()["width"] > 200
    expect(card(page, "Held-out reward (test)").locator("circle")).to_have_count(3)
    time_split = card(page, "Time per step")
    expect(time_split.locator("rect")).to_have_count(12 * 5 + 3)
    legend = "generationagentjudgetrainingsyncevaluation"
    expect(time_split.locator(".legend")).to_have_text(legend)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    expect(time_split.locator(".now")).to_have_text(f"{last['time/step']:.1f} s")
    expect(time_split.locator("text.axis").filter(has_text="seconds")).to_be_visible()
    expect(time_split.locator("text.axis").filter(has_text="step")).to_be_visible()
    parts = time_split.locator(".legend i")
    colours = parts.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) == len(colours) == 6
    expect(page.locator("#outcomes")).to_have_text("completed180timeout12")
    expect(page.locator("#balance")).to_have_text("12,000 sampled = 11,520 trained + 480 timeout")
    for title in ("Calls cut off", "Unreadable tool calls"):
        expect(card(page, title).locator("circle")).to_have_count(12)
    titles = page.locator(".chart h3").all_inner_texts()
    assert all(title[0].isupper() for title in titles), titles
    box = reward.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 40)
    expect(page.locator("#tip")).to_contain_text("step 12")


def test_training_tasks_over_time_are_sorted_and_lead_to_their_traces(page, link):
    page.goto(link)
    tasks = page.locator("#tasks")
    expect(tasks.locator("table")).to_have_count(0)  # until it is opened
    tasks.locator("summary").click()
    expect(tasks.locator("th")).to_contain_text(
        ["task", "steps", "rollouts", "mean", "change", "mean reward, steps 1 to 12"]
    )
    rows, means = tasks.locator("tbody tr"), []
    for _ in range(2):  # the lowest first, then the highest
        means.append([float(one) for one in rows.locator("td:nth-child(4)").all_inner_texts()])
        tasks.locator("th button", has_text=re.compile("^mean$")).click()
    assert means[0] == sorted(means[0])
    assert means[1] == sorted(means[0], reverse=True)
    expect(tasks.locator("th[aria-sort=ascending]")).to_have_text("mean")
    squares = rows.first.locator(".heat i")
    expect(squares).to_have_count(12)
    expect(rows.first.locator(".heat i[title*='mean reward']").first).to_be_visible()
    expect(tasks.locator("#task-note")).to_contain_text("Each square is a step: from 0 (orange)")
    name = rows.first.locator("td button")
    text = name.inner_text()
    name.click()
    expect(page.locator("#f-text")).to_have_value(re.compile(re.escape(text[:40])))
    expect(shown(page).first).to_contain_text(text[:20])


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
    expect(first.get_by_text("1 tool offered: add")).to_be_visible()
    # What an earlier call had is folded away; the result of the tool is new.
    expect(second.get_by_text("3 messages as in call 1")).to_be_visible()
    expect(second.locator(".message.tool")).to_contain_text("6")
    expect(second.locator(".message.answer")).to_contain_text("Mia has 6 marbles.")
    expect(detail.locator(".branch")).to_have_count(0)


def test_branches_are_shown_at_their_call_with_the_cause(page, link):
    page.goto(link)
    open_trace(page, "1-0-3")
    branch = page.locator("#detail .call").nth(1).locator(".branch")
    expect(branch).to_contain_text("Branch: reasoning removed.")
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
        "reasoning removed48new conversation24different tools24whitespace changed24"
    )
    expect(page.locator("#branched")).to_have_text(f"120 branches in {TRACES} traces")
    causes.get_by_role("button", name="different tools").click()
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


def test_a_row_that_is_pressed_while_traces_arrive_opens(page, serve, tmp_path):
    run = write_example(tmp_path / "run", steps=1)
    page.goto(serve(run))
    expect(page.locator("#shown")).to_have_text("16 traces")
    shown(page).first.hover()
    page.mouse.down()
    TraceStore(run / "traces").append(example_trace(2, 0, 0, "plain", reward=0.25))
    expect(page.locator("#shown")).to_have_text("17 traces")
    added = page.locator("#list .row", has_text="2-0-0")
    assert not added.count()
    page.mouse.up()
    expect(page.locator("#list .row[aria-selected=true]")).to_have_count(1)
    expect(added).to_have_count(1)


def seconds_until(page, act, text):
    """How long after `act` the page says that it shows `text`."""
    started = time.monotonic()
    act()
    page.locator("#shown", has_text=re.compile(text)).wait_for(timeout=1000 * WAIT_SECONDS)
    return time.monotonic() - started


def test_a_hundred_thousand_traces_are_listed_filtered_and_scrolled(page, serve, tmp_path):
    run = write_many(tmp_path / "run", MANY)
    link = serve(run)
    # Nothing is indexed yet: the page shows what there is, and goes on.
    first = seconds_until(page, lambda: page.goto(link), "traces so far$")
    shown(page).first.wait_for()
    assert first < VIEW_SECONDS
    # Another process goes on with the same index, and so nobody has to wait for the page.
    page.goto("about:blank")
    index = TraceIndex(run / "traces", keep=True)
    assert index.refresh()
    assert index.count_branches()
    index.close()
    again = seconds_until(page, lambda: page.goto(link), "^100,000 traces$")
    expect(page.locator("#branched")).to_have_text("10,000 branches in 100,000 traces")
    filters = {
        "step": lambda: choose(page, "step", "77"),
        "clear": lambda: page.get_by_role("button", name="clear").click(),
        "search": lambda: page.locator("#f-text").fill("IN STEP 50:"),
        "both": lambda: choose(page, "step", "51"),
    }
    texts = ["^1,000 of", "^100,000 traces$", "^1,000 of", "^0 of"]
    taken = [
        seconds_until(page, act, text) for act, text in zip(filters.values(), texts, strict=True)
    ]
    print(f"first view {first:.2f} s, indexed {again:.2f} s, filters", [f"{t:.3f}" for t in taken])
    assert again < VIEW_SECONDS
    assert max(taken) < FILTER_SECONDS
    page.get_by_role("button", name="clear").click()
    expect(page.locator("#shown")).to_have_text("100,000 traces")
    assert shown(page).count() < 100  # only those in view are in the document
    page.locator("#list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    expect(shown(page).last).to_contain_text("100-124-7")
    page.locator("#list").focus()
    page.keyboard.press("End")
    expect(page.locator("#detail h3").first).to_contain_text("step 100, task 124, rollout 7")


def test_rows_show_task_and_answer_and_a_search_finds_both(page, link):
    page.goto(link)
    row = page.locator("#list .row", has_text=re.compile("^1-0-0"))
    expect(row.locator(".text")).to_have_text(["2 + 4 · 6", "→ Mia has 6 marbles."])
    page.locator("#f-text").fill("2 + 4")
    expect(page.locator("#shown")).to_have_text(f"12 of {TRACES} traces")
    page.locator("#f-text").fill("MIA  HAS 7")
    expect(page.locator("#shown")).to_have_text(re.compile(f"^(?!12 )\\d+ of {TRACES} traces"))
    expect(shown(page).first).to_contain_text("→ Mia has 7 marbles.")
    page.locator("#f-text").fill("nobody said this")
    expect(page.locator("#shown")).to_have_text(f"0 of {TRACES} traces")
    expect(shown(page)).to_have_count(0)


def test_the_worst_and_the_most_changed_can_come_first(page, link):
    page.goto(link)
    choose(page, "order", "worst")
    expect(shown(page).first).to_contain_text("timeout")
    expect(shown(page).nth(12)).to_contain_text(re.compile(r"^\d+-\d-\d0completed"))
    choose(page, "order", "best")
    expect(shown(page).first).to_contain_text(re.compile(r"^\d+-\d-\d1completed"))
    choose(page, "order", "changed")
    first = shown(page).first
    expect(first).to_contain_text(re.compile(r"task [+-][01]"))
    text = first.locator(".text").first.inner_text()
    expect(shown(page).nth(1).locator(".text").first).to_have_text(text)


def test_tools_roles_and_outcomes_are_added_up_and_roles_have_curves(page, link):
    page.goto(link)
    expect(page.locator("#tables table")).to_have_count(3)
    outcomes, tools, roles = page.locator("#tables table").all()
    expect(outcomes.locator("tbody tr").first).to_contain_text("completed180 (93.8 %)")
    expect(tools.locator("tbody tr")).to_have_text(re.compile(r"^add19224 \(12\.5 %\)"))
    expect(roles.locator("tbody td:first-child")).to_have_text(["solver", "checker"])
    curve = card(page, "Mean reward of calls by role")
    expect(curve.locator(".legend span")).to_have_text(["checker", "solver"])
    expect(curve.locator("path.line")).to_have_count(2)
    expect(card(page, "Tool calls that failed").locator("circle")).to_have_count(12)
    outcomes.get_by_role("button", name="timeout").click()
    expect(page.locator("#shown")).to_have_text(f"12 of {TRACES} traces")


def test_one_task_before_and_after_training_side_by_side(page, link):
    page.goto(link)
    open_trace(page, "1-0-0")
    page.get_by_role("button", name="side by side").click()
    before, after = page.locator(".side").first, page.locator(".side").last
    expect(page.locator("#detail h3").first).to_have_text("train: 12 rollouts of one task")
    expect(page.locator("#detail")).to_contain_text(re.compile("in step 1 → .* in step 11"))
    expect(before.locator("option:checked")).to_have_text(re.compile("^step 1, rollout 0: reward"))
    expect(after.locator("option:checked")).to_have_text(re.compile("^step 11, rollout 3: reward"))
    for side in (before, after):
        expect(side.locator(".message.user")).to_contain_text("Mia has 2 marbles and finds 4 more")
        expect(side.locator(".message.answer").last).to_contain_text("Mia has 6 marbles.")
    after.locator("select").select_option(label=after.locator("option").nth(5).inner_text())
    expect(after.locator(".message.answer").first).to_be_visible()
    page.get_by_role("button", name="this rollout").click()
    expect(page.locator("#detail h3").first).to_have_text("train, step 1, task 0, rollout 0")


def test_a_long_title_stays_in_its_card(page, run, tmp_path):
    name = "workflow/" + "a_name_without_an_end_" * 8
    data = report_data(RunReader(run), trace_bytes=2**16)
    data["run"]["name"] = name
    for row in data["metrics"]:
        row[name] = row["step"] / 3
    (tmp_path / "report.html").write_text(html_of(data), encoding="utf-8")
    page.goto((tmp_path / "report.html").as_uri())
    page.locator("#others > summary").click()
    for node in (card(page, name), page.locator("header")):
        expect(node).to_be_visible()
        assert node.evaluate("node => node.scrollWidth <= node.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_on_a_phone_a_tap_points_and_opens(browser, link):
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True
    )
    try:
        page = context.new_page()
        page.goto(link)
        shown(page).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        card(page, "Training reward, mean").locator("svg").tap()
        expect(page.locator("#tip")).to_contain_text("reward/mean: 0.")
        page.locator("#name").tap()
        expect(page.locator("#tip")).to_be_hidden()
        expect(page.locator("#detail")).to_be_hidden()
        shown(page).nth(1).tap()
        expect(page.locator("#detail h3").first).to_be_in_viewport()
        expect(page.locator("#list")).to_be_hidden()
        page.locator("#detail .tokens span.s").first.tap()
        expect(page.locator("#tip")).to_contain_text("log-prob")
        page.get_by_role("button", name="all traces").tap()
        expect(shown(page).nth(1)).to_be_in_viewport()
    finally:
        context.close()


@pytest.fixture
def two_runs(tmp_path, serve):
    """The link of a run beside another one, of the same tasks with other settings."""
    first = write_example(tmp_path / "p/first", steps=3)
    second = write_example(tmp_path / "p/second", steps=6)
    config = second / "config.yaml"
    config.write_text(config.read_text().replace("multi_step_grpo", "ppo"))
    return serve(first)


def test_another_run_is_chosen_and_its_traces_have_links(page, two_runs):
    page.goto(two_runs)
    expect(page.locator("#shown")).to_have_text("48 traces")
    page.locator("#f-run").select_option("second")
    expect(page.locator("#name")).to_have_text("AgentScope / second")
    expect(page.locator("#shown")).to_have_text("96 traces")
    open_trace(page, "1-0-3")
    page.reload()
    expect(page.locator("#name")).to_have_text("AgentScope / second")
    expect(page.locator("#detail h3").first).to_have_text("train, step 1, task 0, rollout 3")


def test_runs_are_compared_by_curves_settings_and_rollouts_of_one_task(page, two_runs):
    page.goto(two_runs)
    page.locator("#compare > summary").click()
    page.get_by_role("checkbox", name="second").check()
    reward = page.locator("#compared .card", has_text="Training reward, mean")
    expect(reward.locator("path.line")).to_have_count(2)
    expect(reward.locator(".legend span")).to_have_text(["first", "second"])
    settings = page.locator("#settings-differ tbody tr")
    expect(settings).to_have_text(["algorithm.algorithm_typemulti_step_grpoppo"])
    open_trace(page, "1-0-0")
    page.get_by_role("button", name="side by side").click()
    before, after = page.locator(".side").first, page.locator(".side").last
    expect(before.locator("option:checked")).to_have_text(re.compile("^first: step 1, rollout 0"))
    expect(after.locator("option:checked")).to_have_text(re.compile("^second: step 6, rollout 3"))
    expect(after.locator(".message.answer").last).to_contain_text("Mia has 6 marbles.")


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
    expect(page.locator("#notes")).to_contain_text(
        "The run stopped early: TrainingError: no signal"
    )
    open_trace(page, "1-0-0")
    first, second = page.locator("#detail .call").nth(0), page.locator("#detail .call").nth(1)
    expect(first.locator("h3")).to_have_text("Call 1 of 2 · solver")
    expect(first.locator(".facts")).to_contain_text("reward of the call 0.125")
    expect(first.locator(".facts")).to_contain_text("reasoning kept in the prompt 17 tokens")
    expect(second.locator(".facts")).to_contain_text("dialect responses")
    expect(second.locator(".note.bad")).to_contain_text("the agent did not receive this answer")
    expect(second.locator(".tokens")).to_have_class(re.compile("untrained"))


def test_traces_of_the_first_format_are_shown_too(page, serve, tmp_path, run):
    from tuner.traces.store import to_plain

    old = write_example(tmp_path / "run", steps=1)
    path = old / "traces/step_000001.jsonl"
    traces = TraceStore(old / "traces").read("train", 1)
    path.write_text("".join(json.dumps(to_plain(trace)) + "\n" for trace in traces))
    page.goto(serve(old))
    expect(page.locator("#branched")).to_have_text("10 branches in 16 traces")
    open_trace(page, "1-0-3")
    expect(page.locator("#detail .branch")).to_have_attribute("data-cause", "reasoning")


def test_tasks_that_were_drawn_once_have_no_course_to_show(page, serve, tmp_path):
    page.goto(serve(write_example(tmp_path / "run", steps=1)))
    expect(page.locator("#shown")).to_have_text("16 traces")
    expect(page.locator("#tasks")).to_be_hidden()


def test_what_is_new_moves_neither_the_page_nor_a_list_nor_a_table(page, serve, tmp_path):
    run = write_example(tmp_path / "run", steps=8)
    page.set_viewport_size({"width": 420, "height": 700})
    page.goto(serve(run))
    expect(page.locator("#shown")).to_have_text("128 traces")
    choose(page, "order", "new")
    expect(shown(page).first).to_contain_text("8-3-3")
    page.locator("#list").evaluate("list => { list.scrollIntoView(); list.scrollTop = 20 * 69; }")
    name = page.locator("#row-22").inner_text().split("\n")[0]
    table = page.locator("#tables .scroll").nth(1)
    page.locator("#tables").evaluate("tables => { tables.style.gridTemplateColumns = '200px'; }")
    assert table.evaluate("box => { box.scrollLeft = 30; return box.scrollLeft; }") == 30
    page.locator("#list").evaluate("list => list.scrollIntoView()")
    where = page.locator("#list .row", has_text=re.compile(f"^{name}")).bounding_box()["y"]
    assert page.evaluate("scrollY") > 500
    for rollout in range(3):
        TraceStore(run / "traces").append(example_trace(9, 0, rollout))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with (run / "metrics.jsonl").open("a") as file:  # and a chart more above the list
        file.write(json.dumps({**last, "step": 9, "train/clip_fraction": 0.1}) + "\n")
    expect(page.locator("#shown")).to_have_text("131 traces")
    expect(page.locator("#steps")).to_have_text("step 9 of 20")
    row = page.locator("#list .row", has_text=re.compile(f"^{name}"))
    assert abs(row.bounding_box()["y"] - where) < 2
    assert table.evaluate("box => box.scrollLeft") == 30
