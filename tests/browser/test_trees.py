"""Rollouts that begin inside others, as the page of a real run shows them, served and as a file."""

import dataclasses
import functools
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import expect

from tests.browser.example_run import TINY, example_trace, write_example
from tests.browser.test_viewer import choose, open_trace
from tests.kit import runs
from tuner.loop import run_local
from tuner.tools.viewer import RunReader, write_report
from tuner.tools.viewer.page import page as html_of
from tuner.tools.viewer.page import report_data
from tuner.tools.viewer.queries import tree
from tuner.traces import Origin, RolloutId, TraceStore


@pytest.fixture(scope="session")
def tree_run(tmp_path_factory):
    """A step of a real run whose rollouts begin inside others, calls and completions."""
    settings = {
        "algorithm.algorithm_type": "tree",
        "algorithm.repeat_times": 8,
        "buffer.batch_size": 1,
        "buffer.total_steps": 1,
        "model.temperature": 3.0,
        "tuner.branching.ends": 4,
        "tuner.branching.inside": "true",
        "tuner.branching.rounds": 2,
        "tuner.branching.trunks": 2,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    begin = functools.partial(
        run_local,
        runs.config(TINY, tmp_path_factory.mktemp("tree"), *overrides),
        workflow=runs.talk,
        judge=runs.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={},
    )
    with ThreadPoolExecutor(1) as threads:  # Playwright's event loop is in this one
        return threads.submit(begin).result().run_dir


@pytest.fixture(params=["served", "report"])
def tree_link(request, serve, tree_run):
    """The run with branches, likewise."""
    return serve(tree_run) if request.param == "served" else write_report(tree_run).as_uri()


@pytest.fixture(scope="session")
def traces(tree_run):
    """The rollouts of the run, by number."""
    return {trace.id.rollout: trace for trace in TraceStore(tree_run / "traces").read("train", 1)}


@pytest.fixture(scope="session")
def branch(traces):
    """The last one that begins inside another one."""
    return [trace for trace in traces.values() if trace.origin is not None][-1]


def number(value):
    """As the page writes it, with three digits."""
    return str(int(value)) if value == int(value) else f"{value:.3g}"


def begin(trace):
    return f"call {trace.origin.calls + 1}, after {trace.origin.token} token"


def test_a_rollout_shows_its_tree_with_values_and_opens_its_ends(
    page, tree_link, tree_run, traces, branch
):
    reader = RunReader(tree_run)
    reader.traces.refresh()
    found = tree(reader.traces, branch.id)
    page.goto(tree_link)
    open_trace(page, f"1-0-{branch.id.rollout}")
    expect(page.locator("#detail .note.fork").first).to_contain_text(
        f"Starts inside rollout {branch.origin.rollout.rollout}, inside {begin(branch)}"
    )
    shown = page.locator("#detail .tree")
    expect(shown.locator("button")).to_have_count(len(found["ends"]))
    for end in found["ends"]:
        line = shown.locator("button", has_text=f"rollout {end['rollout']}reward")
        expect(line).to_contain_text(f"reward {number(end['reward'])}")
    for fork in found["forks"]:
        point = f"call {fork['call'] + 1}, after {fork['token']} token"
        worth = f"value {number(fork['mean'])} of {fork['ends']} ends"
        expect(shown.locator(".at", has_text=point)).to_contain_text(worth)
    # The trunk is the first line; the arrow keys go there, and a press opens it.
    current = shown.locator("[aria-current=true]")
    expect(current).to_contain_text(f"rollout {branch.id.rollout}")
    expect(shown.locator("button[tabindex='0']")).to_have_count(1)
    current.focus()
    for _ in found["ends"]:
        page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    title = f"train, step 1, task 0, rollout {found['trunk']}"
    expect(page.locator("#detail h3").first).to_have_text(title)
    expect(shown.locator("[aria-current=true]")).to_be_focused()
    shown.locator("button", has_text=f"rollout {branch.id.rollout}reward").click()
    expect(page.locator("#detail h3").first).to_contain_text(f"rollout {branch.id.rollout}")


def test_at_a_fork_it_says_what_the_others_said_instead_and_what_was_given_back(
    page, tree_link, traces, branch
):
    page.goto(tree_link)
    open_trace(page, f"1-0-{branch.id.rollout}")
    given = [call for call in branch.calls if call.given_back]
    expect(page.locator("#detail .call.given")).to_have_count(len(given))
    expect(page.locator("#detail .tokens span.back")).to_have_count(branch.replayed_tokens)
    expect(page.locator("#detail .tokens span.s")).to_have_count(branch.sampled_tokens)
    forked = page.locator("#detail .call").nth(branch.origin.calls)
    expect(forked.locator(".facts")).to_contain_text(f"({branch.calls[1].replayed} replayed)")
    fork = forked.locator("details.fork", has_text=begin(branch))
    fork.locator("summary").click()
    others = [
        trace
        for trace in traces.values()
        if trace.id == branch.origin.rollout
        or (trace.origin == branch.origin and trace.id != branch.id)
    ]
    expect(fork.locator(".side")).to_have_count(len(others))
    for other in others:
        column = fork.locator(".side", has_text=f"rollout {other.id.rollout} ")
        expect(column).to_contain_text(f"reward {number(other.reward)}")
        pairs = zip(branch.calls, other.calls, strict=False)
        differ = [i for i, (a, b) in enumerate(pairs) if a.completion_ids != b.completion_ids]
        said = column.locator(".message.answer")
        expect(said).to_have_count(1)
        if text := other.calls[differ[0]].response["content"]:
            expect(said).to_contain_text(text.split()[0])


def test_rollouts_are_listed_by_where_they_begin(page, tree_link, traces, link, run):
    begun = sum(trace.origin is not None for trace in traces.values())
    replayed = sum(trace.replayed_tokens for trace in traces.values())
    page.goto(tree_link)
    expect(page.locator("#balance")).to_contain_text(f"; {replayed} more were replayed")
    choose(page, "begins", "inside")
    expect(page.locator("#shown")).to_have_text(f"{begun} of {len(traces)} traces")
    expect(page.locator("#list .row", has_text="↳")).to_have_count(begun)
    choose(page, "begins", "start")
    expect(page.locator("#list .row", has_text="↳")).to_have_count(0)
    choose(page, "begins", "diverged")
    expect(page.locator("#shown")).to_have_text(f"0 of {len(traces)} traces")
    # A run without any has no such filter.
    page.goto(link)
    expect(page.locator("#f-cause")).to_be_visible()
    expect(page.locator("#begins")).to_be_hidden()


def test_what_diverged_says_where_and_how(page, tree_run, branch, tmp_path):
    data = report_data(RunReader(tree_run), trace_bytes=2**20)
    name = f"1-0-{branch.id.rollout}"
    (body,) = (
        one for one in data["bodies"].values() if one["trace"]["id"]["rollout"] == branch.id.rollout
    )
    body["trace"]["origin"] |= {"diverged": "at call 1: another message", "left_at": 1}
    (tmp_path / "report.html").write_text(html_of(data), encoding="utf-8")
    page.goto((tmp_path / "report.html").as_uri())
    open_trace(page, name)
    note = page.locator("#detail .note.bad")
    expect(note).to_contain_text("Diverged. It was planned to start inside rollout")
    expect(note).to_contain_text("diverged from that rollout at call 2: another message")


def test_a_hundred_ends_fit(page, tmp_path):
    run = write_example(tmp_path / "run", steps=1, tasks=1, rollouts=1)
    origin = Origin(RolloutId(2, 0, 0), 1, 1)
    store = TraceStore(run / "traces")
    for n in range(101):
        made = example_trace(2, 0, n, "plain", reward=n / 100, origin=origin if n else None)
        first = made.calls[0]
        given = dataclasses.replace(first, replayed=len(first.completion_ids) if n else 0)
        store.append(dataclasses.replace(made, calls=(given, *made.calls[1:])))
    page.goto(write_report(run).as_uri())
    open_trace(page, "2-0-0")
    shown = page.locator("#detail .tree")
    expect(shown.locator("button")).to_have_count(101)
    expect(shown.locator(".at")).to_have_text("before call 2value 0.5 of 101 ends")
    assert shown.bounding_box()["height"] <= 420
    fork = page.locator("#detail details.fork")
    fork.locator("summary").click()
    expect(fork.locator(".side")).to_have_count(6)
    expect(fork.locator(".side").last).to_contain_text("reward 0.06the same to the end")
    fork.get_by_role("button", name="show 6 more of 94").click()
    expect(fork.locator(".side")).to_have_count(12)
    expect(fork.get_by_role("button", name=re.compile("more of 88"))).to_be_visible()
