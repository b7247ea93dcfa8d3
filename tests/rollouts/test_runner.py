"""What happens to a rollout, whatever the user's functions do. Real gateway, engine and model."""

import asyncio
import contextlib
import math
import re
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from tests.kit.clock import jump
from tests.rewards import functions
from tuner.config.source import MASK
from tuner.errors import FunctionError, TrainingError
from tuner.gateway import SamplingDefaults
from tuner.rewards import in_process
from tuner.rollouts import RolloutSettings, StepPlan, collect, limits
from tuner.rollouts.limits import RolloutEnd
from tuner.tasks.functions import JudgeOutput, Rejected, WorkflowOutput
from tuner.traces import Outcome, RolloutId, TraceStore

MESSAGES = [{"role": "user", "content": "hi"}]
DEFAULTS = SamplingDefaults(max_tokens=4)


async def run(runner, task=None):
    return await runner.run(task or {"question": "hi"}, RolloutId(1, 0, 0), DEFAULTS)


async def ask(model):
    return (await model(MESSAGES)).content


async def good_workflow(task, model):
    return WorkflowOutput(response=await ask(model), metrics={"turns": 1})


async def test_completed_rollout_has_calls_reward_and_metrics_of_both_functions(make_runner):
    async def judge(task, response):
        return JudgeOutput(reward=0.5, metrics={"length": len(response)}, feedback="too short")

    (trace,) = await run(make_runner(good_workflow, judge))
    assert trace.feedback == "too short"
    assert trace.outcome is Outcome.COMPLETED
    assert trace.reward == 0.5
    assert trace.metrics == {"turns": 1, "length": len(trace.response)}
    assert len(trace.calls) == 1
    assert trace.calls[0].messages == MESSAGES
    assert trace.seconds["workflow"] >= trace.seconds["generation"] > 0


async def test_equal_ids_and_seeds_sample_the_same(make_runner):
    async def workflow(task, model):
        await asyncio.gather(ask(model), ask(model))
        return WorkflowOutput(reward=1.0)

    first, second = [(await run(make_runner(workflow)))[0] for _ in range(2)]
    assert [c.completion_ids for c in first.calls] == [c.completion_ids for c in second.calls]
    assert first.calls[0].completion_ids != first.calls[1].completion_ids


async def test_workflow_error_is_named_and_has_no_reward(make_runner):
    async def workflow(task, model):
        await ask(model)
        raise KeyError("qestion")

    (trace,) = await run(make_runner(workflow))
    assert trace.outcome is Outcome.WORKFLOW_ERROR
    assert trace.error == "KeyError: 'qestion'"
    assert trace.reward is None
    assert len(trace.calls) == 1


async def test_a_retry_has_a_session_of_its_own(make_runner):
    attempts = []

    async def workflow(task, model):
        attempts.append(model)
        await ask(model)
        if len(attempts) < 3:
            raise RuntimeError("flaky")
        return WorkflowOutput(reward=1.0)

    traces = await run(make_runner(workflow, retries=2))
    assert [t.outcome for t in traces] == ["workflow_error", "workflow_error", "completed"]
    assert [(t.attempt, t.final) for t in traces] == [(1, False), (2, False), (3, True)]
    assert [len(t.calls) for t in traces] == [1, 1, 1]
    assert len({model.api_key for model in attempts}) == 3


async def test_timed_out_attempt_never_reaches_the_retry_trace(make_runner):
    late, kept = [], []

    async def workflow(task, model):
        kept.append(model)
        if len(kept) == 1:
            try:
                await ask(model)
                jump(60)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                late.append(model)
                raise
        await ask(model)
        return WorkflowOutput(reward=1.0)

    first, second = await run(make_runner(workflow, timeout=60, retries=1))
    assert first.outcome is Outcome.TIMEOUT
    assert "within 60 s" in first.error
    assert not first.final
    assert second.outcome is Outcome.COMPLETED
    assert len(second.calls) == 1
    with pytest.raises(Exception, match="has ended"):
        await ask(late[0])
    assert len(first.calls) == 1


async def test_workflow_that_swallows_its_cancellation_is_still_a_timeout(make_runner):
    async def workflow(task, model):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return WorkflowOutput(reward=1.0)

    (trace,) = await run(make_runner(workflow, timeout=0.05))
    assert trace.outcome is Outcome.TIMEOUT
    assert trace.reward is None


async def test_the_users_own_timeout_is_a_workflow_error(make_runner):
    async def workflow(task, model):
        raise TimeoutError("the database")

    (trace,) = await run(make_runner(workflow))
    assert trace.outcome is Outcome.WORKFLOW_ERROR
    assert trace.error == "TimeoutError: the database"


async def test_workflow_that_cancels_itself_is_cancelled_not_lost(make_runner):
    async def workflow(task, model):
        raise asyncio.CancelledError

    (trace,) = await run(make_runner(workflow))
    assert trace.outcome is Outcome.CANCELLED


async def test_workflow_without_calls_has_nothing_to_train(make_runner):
    async def workflow(task, model):
        return WorkflowOutput(reward=1.0)

    (trace,) = await run(make_runner(workflow))
    assert trace.outcome is Outcome.NO_CALLS
    assert trace.reward is None


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_reward_that_is_not_finite_is_invalid(make_runner, reward):
    def judge(task, response):
        return JudgeOutput(reward=reward)

    (trace,) = await run(make_runner(good_workflow, judge))
    assert trace.outcome is Outcome.INVALID_REWARD
    assert trace.reward is None


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_workflow_reward_that_is_not_finite_is_invalid(make_runner, reward):
    async def workflow(task, model):
        await ask(model)
        return WorkflowOutput(reward=reward)

    (trace,) = await run(make_runner(workflow))
    assert trace.outcome is Outcome.INVALID_REWARD
    assert trace.reward is None
    assert trace.error == f"the workflow gave reward {reward}; a reward must be a finite number"


async def test_failing_judge_is_asked_again_with_the_same_response(make_runner):
    seen = []

    async def judge(task, response):
        seen.append(response)
        if len(seen) == 1:
            raise ConnectionError("down")
        return JudgeOutput(reward=1.0)

    (trace,) = await run(make_runner(good_workflow, judge, retries=1))
    assert trace.outcome is Outcome.COMPLETED
    assert len(trace.calls) == 1
    assert seen[0] == seen[1]


async def test_judge_that_keeps_failing_is_a_judge_error(make_runner):
    async def judge(task, response):
        raise ConnectionError("down")

    (trace,) = await run(make_runner(good_workflow, judge, retries=1))
    assert trace.outcome is Outcome.JUDGE_ERROR
    assert trace.error == "ConnectionError: down"
    assert len(trace.calls) == 1


async def test_a_reward_function_that_hangs_or_dies_is_the_judges_failure(make_runner):
    """Whoever calls it: the judge, or the workflow itself; the agent is not run again for it."""
    hang, die = in_process(functions.hang, timeout=0.1), in_process(functions.die)

    async def judge(task, response):
        return JudgeOutput(reward=await hang("a"))

    async def judges_itself(task, model):
        output = await good_workflow(task, model)
        return WorkflowOutput(response=output.response, reward=await die("a"))

    (trace,) = await run(make_runner(good_workflow, judge))
    assert trace.outcome is Outcome.JUDGE_TIMEOUT
    assert trace.error == "RewardTimeout: judge timed out: hang took more than 0.1 s"
    (trace,) = await run(make_runner(judges_itself, retries=3))
    assert trace.outcome is Outcome.JUDGE_ERROR
    assert trace.reward is None
    assert len(trace.calls) == 1


async def test_missing_reward_stops_the_run_with_what_to_do(make_runner):
    with pytest.raises(FunctionError, match="no judge was given"):
        await run(make_runner(good_workflow))


async def test_wrong_return_type_stops_the_run(make_runner):
    async def workflow(task, model):
        return [1.0]

    with pytest.raises(FunctionError, match="WorkflowOutput"):
        await run(make_runner(workflow))


def says_yes(task, response):
    return "yes"


def says_yes_to_all(task, responses):
    return ["yes" for _ in responses]


def expects_a_text(task, response):
    return float("yes" in response.lower())


@pytest.mark.parametrize(
    ("judge", "told"),
    [
        (says_yes, r"returned 'yes' \(str\); a judge returns JudgeOutput"),
        (says_yes_to_all, r"returned 'yes' \(str\); a judge returns JudgeOutput"),
        (expects_a_text, "tried on this value: AttributeError: 'list' object has no attribute"),
        (lambda task, response: 1.0, None),
    ],
)
async def test_a_wrong_return_of_the_workflow_is_told_with_the_mistake_of_the_judge(
    make_runner, judge, told
):
    async def workflow(task, model):
        return [await ask(model)]

    with pytest.raises(FunctionError) as caught:
        await run(make_runner(workflow, judge))
    first, *others = str(caught.value).splitlines()
    assert "workflow" in first
    assert "a workflow returns WorkflowOutput, or a text, a number" in first
    assert len(others) == (told is not None)
    for line in others:
        assert re.search(rf"{judge.__name__} \({__file__}:\d+\),? {told}", line)


async def test_a_failure_is_logged_with_the_users_frames_alone(make_runner, caplog, monkeypatch):
    def judge(task, response):
        return score(response)

    def score(response):
        return response.missing

    def frames():
        (text,) = [one.getMessage() for one in caplog.records if "missing" in one.getMessage()]
        first, *lines = text.splitlines()
        assert re.match(rf"\S*score \({__file__}:\d+\): AttributeError: ", first)
        return [line.strip() for line in lines]

    await run(make_runner(good_workflow, judge))
    assert frames() == [
        f'File "{__file__}", line {judge.__code__.co_firstlineno + 1}, in judge',
        "return score(response)",
        f'File "{__file__}", line {score.__code__.co_firstlineno + 1}, in score',
        "return response.missing",
    ]
    caplog.clear()
    monkeypatch.setenv("TUNER_DEBUG", "1")
    await run(make_runner(good_workflow, judge))
    assert any("tuner/tasks/functions.py" in line for line in frames())


async def test_prompt_without_room_says_so(make_runner):
    async def workflow(task, model):
        await model([{"role": "user", "content": "x" * 500}])
        return WorkflowOutput(reward=1.0)

    (trace,) = await run(make_runner(workflow))
    assert trace.outcome is Outcome.WORKFLOW_ERROR
    assert "max_model_len" in trace.error


async def test_plain_functions_run_beside_the_loop(make_runner):
    main = threading.get_ident()
    threads = []

    def workflow(task, model, auxiliary_models):
        threads.append(threading.get_ident())
        return WorkflowOutput(reward=1.0, response=sorted(auxiliary_models))

    (trace,) = await run(make_runner(workflow, auxiliary={"helper": object()}))
    assert trace.response == "['helper']"
    assert threads[0] != main


async def test_task_that_a_workflow_changes_is_fresh_for_the_judge(make_runner):
    async def workflow(task, model):
        await ask(model)
        task["question"] = "changed"
        return WorkflowOutput(response="r")

    async def judge(task, response):
        return JudgeOutput(reward=1.0 if task["question"] == "hi" else 0.0)

    (trace,) = await run(make_runner(workflow, judge))
    assert trace.reward == 1.0


def plan(tasks=3, repeat=2):
    return StepPlan("train", 1, [{"n": i} for i in range(tasks)], repeat, DEFAULTS)


async def test_collect_runs_only_what_is_not_on_disk(make_runner, tmp_path):
    ran = []

    async def workflow(task, model):
        ran.append(task["n"])
        await ask(model)
        if len(ran) == 4:
            raise SystemError("the power is gone")
        return WorkflowOutput(reward=float(task["n"]))

    store = TraceStore(tmp_path)
    runner = make_runner(workflow)
    first = await collect(plan(), runner, store, max_running=1)
    assert len(ran) == 6
    # The traces of two rollouts never got to disk.
    path = store.path("train", 1)
    path.write_text("".join(line for line in path.read_text().splitlines(True)[:4]))
    second = await collect(plan(), runner, TraceStore(tmp_path), max_running=2)
    assert ran[6:] == [2, 2]
    assert [t.id for t in second] == [t.id for t in first] == plan().ids
    assert second[:4] == first[:4]
    assert [t.calls[0].completion_ids for t in second] == [t.calls[0].completion_ids for t in first]


async def test_collect_keeps_to_its_limit(make_runner, tmp_path):
    running, most = 0, 0

    async def workflow(task, model):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await ask(model)
        running -= 1
        return WorkflowOutput(reward=1.0)

    await collect(plan(5, 4), make_runner(workflow), TraceStore(tmp_path), max_running=3)
    assert most == 3


async def test_abort_stops_at_the_first_failure_and_names_it(make_runner, tmp_path):
    async def workflow(task, model):
        await ask(model)
        raise RuntimeError("no database")

    with pytest.raises(TrainingError, match="RuntimeError: no database"):
        await collect(
            plan(),
            make_runner(workflow),
            TraceStore(tmp_path),
            max_running=2,
            abort_on_failure=True,
        )


async def test_a_rejected_rollout_is_not_retried_and_does_not_abort(make_runner, tmp_path):
    async def workflow(task, model):
        await ask(model)
        raise Rejected("too easy")

    (trace,) = await run(make_runner(workflow, retries=2))
    assert (trace.outcome, trace.reward, trace.error) == ("rejected", None, "too easy")
    traces = await collect(
        plan(1, 2),
        make_runner(workflow),
        TraceStore(tmp_path),
        max_running=2,
        abort_on_failure=True,
    )
    assert [t.outcome for t in traces] == ["rejected", "rejected"]


async def test_a_rollout_that_is_ended_from_outside_keeps_what_it_sampled(make_runner):
    ending, asked = RolloutEnd(), asyncio.Event()

    async def workflow(task, model):
        await ask(model)
        asked.set()
        await asyncio.sleep(1000)

    runner = make_runner(workflow, retries=2)
    running = asyncio.ensure_future(
        runner.run({"question": "hi"}, RolloutId(1, 0, 0), DEFAULTS, ending=ending)
    )
    await asked.wait()
    ending.end("enough")
    (trace,) = await running
    assert (trace.outcome, trace.error, trace.reward) == (Outcome.CANCELLED, "enough", None)
    assert trace.sampled_tokens > 0
    # One that has not begun does not begin.
    (trace,) = await runner.run({}, RolloutId(1, 0, 1), DEFAULTS, ending=ending)
    assert (trace.outcome, trace.calls, trace.started) == (Outcome.CANCELLED, (), 0.0)


async def test_time_in_tools_is_limited_and_time_in_answers_is_not(make_runner):
    async def workflow(task, model):
        for _ in range(3):
            await ask(model)
        await asyncio.sleep(task["seconds"])
        return WorkflowOutput(reward=1.0)

    runner, settings = make_runner(workflow), RolloutSettings(timeout=60, max_retries=0, seed=1)
    runner.settings = replace(settings, tool_seconds=0.3)
    (trace,) = await run(runner, {"seconds": 1000})
    assert trace.outcome is Outcome.TIMEOUT
    assert "0.3 s in the agent's own code and tools (tuner.max_tool_seconds)" in trace.error
    assert len(trace.calls) == 3
    runner.settings = replace(settings, tool_seconds=30)
    (trace,) = await run(runner, {"seconds": 0})
    assert trace.outcome is Outcome.COMPLETED


async def test_an_answer_that_takes_longer_than_tools_may_ends_nothing(make_runner, monkeypatch):
    ahead, now = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + ahead[0])

    async def workflow(task, model):
        await ask(model)
        jump(31)  # so that the limit is looked at
        for _ in range(9):
            await asyncio.sleep(0)
        return WorkflowOutput(reward=1.0)

    runner = make_runner(workflow)
    runner.settings = replace(runner.settings, tool_seconds=30)
    engine = runner.gateway.service.engine
    generate = engine.generate

    def slow(*asked, **settings):
        ahead[0] += 40
        return generate(*asked, **settings)

    monkeypatch.setattr(engine, "generate", slow)
    (trace,) = await run(runner)
    assert trace.outcome is Outcome.COMPLETED
    assert trace.seconds["generation"] >= 40


async def test_waiting_for_room_is_told_apart_from_running(make_runner, tmp_path):
    began = []

    async def workflow(task, model):
        began.append(time.perf_counter())
        await ask(model)
        await asyncio.sleep(0.02)
        return WorkflowOutput(reward=1.0)

    started = time.perf_counter()
    traces = await collect(plan(1, 3), make_runner(workflow), TraceStore(tmp_path), max_running=1)
    queues = [trace.seconds["queue"] for trace in traces]
    assert queues[1] >= 0.02
    assert queues[2] >= queues[1] + 0.02
    for waited, began_at in zip(queues, began, strict=True):
        assert waited <= began_at - started
    assert [trace.started for trace in traces] == sorted(trace.started for trace in traces)


# What ends a function is not what ends the run.


async def cancels_its_task(*_):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def is_cancelled(*_):
    raise asyncio.CancelledError


async def exits(*_):
    sys.exit(0)


def exits_in_a_thread(*_):
    sys.exit("no more")


class _NotAnException(BaseException):
    pass


async def raises_what_is_no_exception(*_):
    raise _NotAnException("odd")


async def is_interrupted_by_itself(*_):
    raise KeyboardInterrupt


async def raises_what_closes_coroutines(*_):
    raise GeneratorExit("done")


ENDS = [
    cancels_its_task,
    is_cancelled,
    exits,
    exits_in_a_thread,
    is_interrupted_by_itself,
    raises_what_closes_coroutines,
    raises_what_is_no_exception,
]


@pytest.mark.parametrize("end", ENDS)
async def test_every_rollout_has_an_outcome_whatever_ends_its_judge(make_runner, end, tmp_path):
    async def judge(task, response):
        if task["n"] == 1:
            ended = end()
            if ended is not None:
                await ended
        return JudgeOutput(reward=1.0)

    def plain(task, response):
        end()

    runner = make_runner(good_workflow, plain if end is exits_in_a_thread else judge)
    traces = await collect(plan(), runner, TraceStore(tmp_path), max_running=3)
    assert [trace.id for trace in traces] == plan().ids
    failed = [trace for trace in traces if trace.outcome is Outcome.JUDGE_ERROR]
    assert len(failed) == (6 if end is exits_in_a_thread else 2)
    assert all(trace.reward is None and trace.calls for trace in failed)


@pytest.mark.parametrize(
    ("end", "outcome", "error"),
    [
        (cancels_its_task, Outcome.CANCELLED, "the workflow cancelled itself"),
        (exits, Outcome.WORKFLOW_ERROR, "SystemExit: 0"),
        (exits_in_a_thread, Outcome.WORKFLOW_ERROR, "SystemExit: no more"),
        (is_interrupted_by_itself, Outcome.WORKFLOW_ERROR, "KeyboardInterrupt"),
        (raises_what_closes_coroutines, Outcome.WORKFLOW_ERROR, "GeneratorExit: done"),
        (raises_what_is_no_exception, Outcome.WORKFLOW_ERROR, "_NotAnException: odd"),
    ],
)
async def test_a_workflow_that_would_end_the_process_ends_its_rollout(
    make_runner, end, outcome, error
):
    async def workflow(task, model):
        await ask(model)
        await end()

    def plain(task, model):
        end()

    (trace,) = await run(make_runner(plain if end is exits_in_a_thread else workflow))
    assert (trace.outcome, trace.error) == (outcome, error)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_function_is_nobodys_but_the_persons():
    async def function():
        signal.raise_signal(signal.SIGINT)  # asyncio cancels what it runs
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(limits.without_exit(function()))


def test_a_function_that_is_closed_ends_without_an_error():
    async def function():
        await asyncio.sleep(0)

    work = limits.without_exit(function())
    work.send(None)
    work.close()


KEY = "sk-proj-ABCDEFGHIJ0123456789"


async def raises_its_key(*_):
    raise PermissionError(f"Incorrect API key provided: {KEY}")


async def raises_its_url(*_):
    raise ConnectionError(f"https://me:{KEY}@host/v1?key={KEY} gave no answer")


async def rejects_with_its_key(*_):
    raise Rejected(f"no access with {KEY}")


@pytest.mark.parametrize("end", [raises_its_key, raises_its_url, rejects_with_its_key])
async def test_no_record_and_no_log_holds_a_key(make_runner, end, tmp_path, caplog):
    async def workflow(task, model):
        await ask(model)
        await end()

    async def says_it(task, response):
        return JudgeOutput(reward=0.0, feedback=f"{KEY} was rejected")

    runners = [make_runner(workflow), make_runner(good_workflow, says_it)]
    if end is not rejects_with_its_key:
        runners.append(make_runner(good_workflow, lambda task, response: end()))
    store = TraceStore(tmp_path)
    for runner in runners:
        (trace,) = await run(runner)
        assert MASK in (trace.error or trace.feedback)
        store.append(trace)
    assert KEY not in "".join(file.read_text() for file in tmp_path.iterdir())
    assert KEY not in caplog.text


async def test_an_agent_that_catches_everything_is_cut_off_at_its_deadline(
    make_runner, monkeypatch, caplog
):
    monkeypatch.setattr(limits, "GRACE", 0.5)
    answered_late, refused, thrice, over = [], [], asyncio.Event(), asyncio.Event()

    async def workflow(task, model):
        while not over.is_set():
            try:
                answer = await ask(model)
                if any(isinstance(error, asyncio.CancelledError) for error in refused):
                    answered_late.append(answer)
            except BaseException as error:
                refused.append(error)
                if len(refused) >= 3:
                    thrice.set()

    runner = make_runner(workflow, timeout=0.1)
    (trace,) = await run(runner)
    calls = len(trace.calls)
    refused.clear()
    thrice.clear()
    await thrice.wait()  # it goes on, and gets no more answers
    known = [task for task in asyncio.all_tasks() if "without_exit" in repr(task)]
    over.set()
    assert trace.outcome is Outcome.TIMEOUT
    assert answered_late == []
    assert "train-1-0-0-1 was cancelled" in caplog.text
    assert all("has ended" in str(error) for error in refused)
    assert len(trace.calls) == calls
    assert not known


async def test_a_second_cancellation_leaves_no_agent_for_the_loop_to_wait_for(make_runner):
    began, over = asyncio.Event(), asyncio.Event()

    async def workflow(task, model):
        while not over.is_set():
            began.set()
            with contextlib.suppress(BaseException):
                await over.wait()

    rollout = asyncio.ensure_future(run(make_runner(workflow)))
    await began.wait()
    for _ in range(2):
        rollout.cancel()
        for _ in range(5):  # to where it waits for the agent's end
            await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await rollout
    known = [task for task in asyncio.all_tasks() if "without_exit" in repr(task)]
    over.set()
    assert not known


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no")

    __repr__ = __str__


async def test_objects_that_cannot_be_shown_do_not_hide_what_happened(make_runner):
    async def fails(task, model):
        await ask(model)
        raise Unprintable

    async def answers(task, model):
        await ask(model)
        return WorkflowOutput(reward=1.0, response=Unprintable())

    (trace,) = await run(make_runner(fails))
    assert trace.outcome is Outcome.WORKFLOW_ERROR
    assert trace.error.startswith("Unprintable: <a Unprintable that cannot be shown")
    (trace,) = await run(make_runner(answers))
    assert trace.outcome is Outcome.COMPLETED
    assert trace.response == "<a Unprintable that cannot be shown: ValueError>"


async def test_metrics_that_are_no_number_are_left_out_and_said_once(make_runner, caplog):
    async def workflow(task, model):
        await ask(model)
        return WorkflowOutput(reward=True, metrics={"good": 2, "odd": math.nan})

    runner = make_runner(workflow)
    for _ in range(2):
        (trace,) = await run(runner)
        assert trace.metrics == {"good": 2}
        assert trace.reward == 1.0
    assert caplog.text.count("metric 'odd' is nan") == 1


@pytest.mark.parametrize("fields", [{"reward": "1.0"}, {"reward": 1, "metrics": {"a": b"2"}}])
def test_a_text_is_no_reward(fields):
    with pytest.raises(FunctionError, match="expected a number"):
        JudgeOutput(**fields)
