"""`select_model` with AgentScope's own chat models over HTTP, models elsewhere and tiny models."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.kit import forked, runs
from tests.kit.chat_server import Refusal, chat_server
from tests.pages import blocks
from tuner import (
    ConfigError,
    FunctionError,
    JudgeOutput,
    RemoteModel,
    TrainingError,
    TunerModelConfig,
    WorkflowOutput,
    avg_time_judge,
    avg_token_consumption_judge,
    select_model,
)
from tuner.loop import run_local
from tuner.rewards import final_answer, math_equal
from tuner.tasks.functions import TaskRow
from tuner.traces import read_traces

agentscope = pytest.importorskip("agentscope.model")

TASKS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]
MODELS = Path(__file__).parents[3] / "models"


def right(body):
    return str(int(body["messages"][-1]["content"].split()[2]) + 1)


def by_name(**answers):
    """A server whose models answer each in its own way."""
    return chat_server(lambda body: answers[body["model"]](body))


@pytest.fixture
async def chat_model():
    """Makes chat models of AgentScope, each on a client of its own."""
    made = []

    def make(server, name, **settings):
        client = {"base_url": server.base_url, "max_retries": 0}
        made.append(agentscope.OpenAIChatModel(name, api_key="k", client_kwargs=client, **settings))
        return made[-1]

    yield make
    for model in made:
        await model.client.close()


async def workflow(task, model):
    answer = await model([{"role": "user", "content": task["question"]}])
    if not hasattr(answer, "content"):
        answer = [chunk async for chunk in answer][-1]
    texts = [block["text"] for block in answer.content if block["type"] == "text"]
    return WorkflowOutput(response="".join(texts))


async def judge(task, response, metrics):
    assert {"execution_time", "input_tokens", "output_tokens", "total_tokens"} <= set(metrics)
    found = float(response == task["answer"])
    return JudgeOutput(reward=found, metrics={"right": found})


def select(tmp_path, models, *overrides, **given):
    given = {"workflow_func": workflow, "judge_func": judge, "train_dataset": TASKS} | given
    return select_model(
        candidate_models=models,
        overrides=[
            f"checkpoint_root_dir={tmp_path}",
            "explorer.max_retry_times=0",
            *overrides,
        ],
        **given,
    )


def result_of(tmp_path):
    (file,) = tmp_path.glob("*/*/result.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("stream", [False, True])
async def test_the_better_chat_model_is_returned_with_what_it_took(tmp_path, chat_model, stream):
    with by_name(bad=lambda body: "no idea at all", good=right) as server:
        bad, good = (chat_model(server, name, stream=stream) for name in ("bad", "good"))
        best, metrics = await select(tmp_path, [bad, good])
    assert best is good
    assert (metrics["reward"], metrics["right_avg"], metrics["tied"]) == (1.0, 1.0, 0)
    assert (metrics["input_tokens_avg"], metrics["output_tokens_avg"]) == (7.0, 1.0)
    assert metrics["total_tokens_avg"] == 8.0
    assert metrics["execution_time_avg"] > 0
    assert [one["name"] for one in result_of(tmp_path)["candidates"]] == ["good", "bad"]
    traces = [t for file in sorted(tmp_path.glob("*/*/traces/*")) for t in read_traces(file)]
    assert len(traces) == 12
    (call,) = traces[-1].calls
    assert call.messages == [{"role": "user", "content": traces[-1].task["question"]}]
    assert call.response["content"] == traces[-1].response == traces[-1].task["answer"]
    assert call.streamed is stream


async def test_a_workflow_gets_a_candidate_as_an_object_of_its_own_class(tmp_path, chat_model):
    seen = []

    async def looks(task, model):
        seen.append(model)
        return await workflow(task, model)

    with by_name(one=right, two=right) as server:
        models = [chat_model(server, name, stream=False) for name in ("one", "two")]
        before = [dict(vars(model)) for model in models]
        await select(tmp_path, models, workflow_func=looks)
    assert {type(model).__name__ for model in seen} == {"OpenAIChatModel"}
    assert all(isinstance(model, agentscope.OpenAIChatModel) for model in seen)
    assert all(model.client in [m.client for m in models] for model in seen)
    assert [vars(model) for model in models] == before


async def test_models_of_one_name_are_two_candidates(tmp_path, chat_model):
    with by_name(m=lambda body: "none") as worse, by_name(m=right) as better:
        models = [chat_model(server, "m", stream=False) for server in (worse, better)]
        best, metrics = await select(tmp_path, models)
    assert best is models[1]
    assert metrics["reward"] == 1.0
    assert [one["name"] for one in result_of(tmp_path)["candidates"]] == ["m (2)", "m"]


async def test_models_that_look_alike_share_no_rollouts(tmp_path, chat_model):
    def answer(body):
        return right(body) if server.requests[-1]["headers"]["x-tier"] == "good" else "no"

    with chat_server(answer) as server:
        models = [chat_model(server, "m", stream=False) for _ in range(2)]
        for model, tier in zip(models, ("bad", "good"), strict=True):
            model.client = model.client.with_options(default_headers={"x-tier": tier})
        best, _ = await select(tmp_path, models, max_threads=1)
    assert best is models[1]


async def test_the_most_sparing_candidate_wins_by_its_tokens(tmp_path, chat_model):
    with by_name(first=lambda body: "a very long answer", last=lambda body: "short") as server:
        models = [chat_model(server, name, stream=False) for name in ("first", "last")]
        best, metrics = await select(tmp_path, models, judge_func=avg_token_consumption_judge)
    assert best is models[1]
    assert (metrics["token_consumed_avg"], metrics["reward"]) == (8.0, -8.0)


@pytest.mark.long
async def test_the_fastest_candidate_wins_by_its_seconds(tmp_path, chat_model):
    async def patient(task, model):
        """Asks until the answer is the right one."""
        while (output := await workflow(task, model)).response != task["answer"]:
            pass
        return output

    asked = []

    def slow(body):
        asked.append(body)
        return "no" if len(asked) % 8 else right(body)

    with by_name(slow=slow, fast=right) as server:
        models = [chat_model(server, name, stream=False) for name in ("slow", "fast")]
        best, metrics = await select(
            tmp_path, models, workflow_func=patient, judge_func=avg_time_judge, max_threads=1
        )
    assert best is models[1]
    assert metrics["avg_time_seconds_avg"] == pytest.approx(-metrics["reward"])
    assert metrics["avg_time_seconds_avg"] == pytest.approx(metrics["execution_time_avg"])


def refuses(body):
    raise Refusal(400, "no such voice")


async def test_a_candidate_that_only_fails_does_not_win_against_negative_rewards(
    tmp_path, chat_model
):
    async def strict(task, response):
        return JudgeOutput(reward=-1.0)

    with by_name(broken=refuses, works=right) as server:
        models = [chat_model(server, name, stream=False) for name in ("broken", "works")]
        best, metrics = await select(tmp_path, models, judge_func=strict)
    assert best is models[1]
    assert metrics["reward"] == -1.0
    broken = result_of(tmp_path)["candidates"][1]
    assert (broken["name"], broken["reward"]) == ("broken", None)
    assert broken["failed"] == {"workflow_error": 6}
    assert "no such voice" in broken["first_error"]


async def test_failures_are_counted_by_how_they_failed_and_are_no_rewards(
    tmp_path, chat_model, capsys
):
    async def sometimes(task, model):
        if task["answer"] == "2" and model.model_name == "two":
            raise LookupError("no such tool")
        return await workflow(task, model)

    with by_name(one=lambda body: "no", two=right) as server:
        models = [chat_model(server, name, stream=False) for name in ("one", "two")]
        best, metrics = await select(tmp_path, models, workflow_func=sometimes)
    assert best is models[1]
    assert (metrics["reward"], metrics["rollouts"]) == (1.0, 6)
    assert (metrics["failed"], metrics["failed_workflow_error"]) == (1, 1)
    assert "1 of 6 rollouts of two have no reward" in capsys.readouterr().out


async def test_a_failure_counts_as_a_reward_where_that_is_asked_for(tmp_path, chat_model):
    async def sometimes(task, model):
        if task["answer"] != "2" and model.model_name == "two":
            raise LookupError("no such tool")
        return await workflow(task, model)

    def half(body):
        return right(body) if right(body) < "5" else "no"

    with by_name(one=half, two=right) as server:
        models = [chat_model(server, name, stream=False) for name in ("one", "two")]
        best, metrics = await select(
            tmp_path, models, "tuner.on_failure={penalize: 0}", workflow_func=sometimes
        )
        assert best is models[0]
        assert metrics["reward"] == pytest.approx(4 / 6)
        with pytest.raises(TrainingError, match=r"no such tool.*on_failure is 'abort'"):
            await select(tmp_path, models, "tuner.on_failure=abort", workflow_func=sometimes)


async def test_where_nothing_was_rewarded_the_first_error_of_each_is_said(tmp_path, chat_model):
    async def judge_of_one(task, response):
        raise LookupError("no truth")

    with by_name(broken=refuses, works=right) as server:
        models = [chat_model(server, name, stream=False) for name in ("broken", "works")]
        with pytest.raises(
            TrainingError, match=r"broken: workflow_error.*voice.*works: judge_error.*no truth"
        ):
            await select(tmp_path, models, judge_func=judge_of_one)
    assert not list(tmp_path.glob("*/*/result.json"))


async def test_candidates_that_the_tasks_cannot_tell_apart_are_named(tmp_path, chat_model, capsys):
    def but(wrong):
        return lambda body: "no" if right(body) == wrong else right(body)

    with by_name(one=but("2"), two=but("3"), bad=lambda body: "no") as server:
        models = [chat_model(server, name, stream=False) for name in ("bad", "two", "one")]
        best, metrics = await select(tmp_path, models)
    assert best is models[1]  # the first of equals
    assert metrics["tied"] == 1
    assert metrics["reward_low"] < metrics["reward"] < metrics["reward_high"]
    assert (
        "one cannot be distinguished from two on these tasks: +0.000 [-" in capsys.readouterr().out
    )
    tied = {one["name"]: one["tied"] for one in result_of(tmp_path)["candidates"]}
    assert tied == {"two": False, "one": True, "bad": False}


@pytest.mark.long
async def test_a_hopeless_candidate_is_let_go_early(tmp_path, chat_model, capsys):
    tasks = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(100)]

    def mostly(body):
        return "no" if right(body).endswith("7") else right(body)

    with by_name(bad=lambda body: "no", fair=mostly, good=right, broken=refuses) as server:
        names = ("bad", "fair", "good", "broken")
        models = [chat_model(server, name, stream=False) for name in names]
        best, metrics = await select(
            tmp_path, models, train_dataset=tasks, early_stopping=True, max_threads=8
        )
    assert best is models[2]
    rollouts = {one["name"]: one["rollouts"] for one in result_of(tmp_path)["candidates"]}
    assert rollouts["bad"] == rollouts["broken"] == 16
    assert rollouts["good"] == rollouts["fair"] == metrics["rollouts"]
    assert rollouts["good"] > 16
    printed = capsys.readouterr().out
    assert "bad is dropped after 16 tasks: -1.000 [-1.000, -1.000] against the best" in printed
    assert "broken is dropped after 16 tasks: workflow_error" in printed


async def test_what_a_task_costs_is_said_where_prices_are_known(tmp_path, chat_model):
    with by_name(one=right, two=lambda body: "no") as server:
        models = [chat_model(server, name, stream=False) for name in ("one", "two")]
        remote = RemoteModel(
            base_url=server.base_url, model_name="two", input_price=1.0, output_price=3.0
        )
        _, metrics = await select(
            tmp_path,
            [models[0], remote],
            prices={"one": (2.0, 10.0)},
        )
    assert metrics["cost_avg"] == pytest.approx((7 * 2.0 + 1 * 10.0) / 1e6)
    costs = [one["cost"] for one in result_of(tmp_path)["candidates"]]
    assert costs[1] == pytest.approx((7 * 1.0 + 1 * 3.0) / 1e6)


@pytest.mark.long
async def test_a_selection_goes_on_where_it_stopped_and_takes_further_candidates(
    tmp_path, chat_model
):
    broken_off = []

    async def breaks_off(task, model):
        if len(broken_off) == 8:
            raise asyncio.CancelledError
        broken_off.append(task)
        return await workflow(task, model)

    with by_name(one=right, two=lambda body: "no", three=lambda body: "none") as server:
        models = [chat_model(server, name, stream=False) for name in ("one", "two", "three")]
        again = {"experiment_name": "again", "max_threads": 1}
        await select(tmp_path, models[:2], **again)
        assert len(server.requests) == 12
        best, metrics = await select(tmp_path, models[:2], **again)
        assert len(server.requests) == 12
        assert (best, metrics["reward"]) == (models[0], 1.0)
        # The last line of the second candidate was not written to its end.
        (file,) = tmp_path.glob("*/again/traces/*_000001.jsonl")
        file.write_bytes(file.read_bytes()[:-20])
        await select(tmp_path, [models[2], *models[:2]], **again)
    assert [body["model"] for body in server.requests[12:]] == ["three"] * 6 + ["two"]
    assert len(result_of(tmp_path)["candidates"]) == 3


async def test_at_most_so_many_rollouts_run_at_the_same_time(tmp_path, chat_model):
    running, most = [], []

    async def counted(task, model):
        running.append(task)
        most.append(len(running))
        try:
            return await workflow(task, model)
        finally:
            running.remove(task)

    with by_name(one=right, two=right) as server:
        models = [chat_model(server, name, stream=False) for name in ("one", "two")]
        await select(tmp_path, models, workflow_func=counted)
    assert max(most) == 2


async def test_the_judge_sees_what_that_of_tune_sees(tmp_path, chat_model):
    seen = []

    async def answers(task, model):
        await workflow(task, model)
        return {"response": {"said": task["answer"]}}

    def says_yes(task, response):
        return "yes"

    def plain(task, response, auxiliary_models):
        seen.append((type(task), response, auxiliary_models))
        return True

    with by_name(one=right, two=right) as server:
        models = [chat_model(server, name, stream=False) for name in ("one", "two")]
        await select(tmp_path, models, workflow_func=answers, judge_func=plain)
        with pytest.raises(FunctionError, match=r"(?s)returned \[1\].*says_yes .*returned 'yes'"):
            await select(
                tmp_path / "wrong",
                models,
                workflow_func=lambda task, model: [1],
                judge_func=says_yes,
            )
    assert [(kind, models) for kind, _, models in seen] == [(TaskRow, {})] * 12
    assert all(set(response) == {"said"} for _, response, _ in seen)


async def test_a_judge_may_call_its_task_as_agentscope_does(tmp_path, chat_model):
    def plain(_task, response):
        return JudgeOutput(reward=float(response["response"] == _task["answer"]))

    with by_name(one=lambda body: "no", two=right) as server:
        models = [chat_model(server, name, stream=False) for name in ("one", "two")]
        best, _ = await select(tmp_path, models, judge_func=plain)
    assert best is models[1]


EXAMPLE = Path(__file__).parents[3] / "examples/gsm8k/data"


async def solved(task, response):
    truth = final_answer(task["answer"])
    return JudgeOutput(reward=math_equal(final_answer(response), truth))


@pytest.mark.long
async def test_tiny_models_are_selected_by_path_and_by_settings(tmp_path, random_model_path):
    rows = [json.loads(line) for line in (EXAMPLE / "test.jsonl").read_text().splitlines()[:100]]
    tiny = TunerModelConfig(model_path=str(MODELS / "tiny_math"), max_model_len=512)
    found = await select(
        tmp_path,
        [random_model_path, MODELS / "tiny_search", tiny],
        "model.max_response_tokens=64",
        judge_func=solved,
        train_dataset=rows,
        early_stopping=True,
        max_threads=16,
    )
    assert found[0] is tiny
    assert found[1]["input_tokens_avg"] > 10
    # All on all would be 300.
    assert sum(one["rollouts"] for one in result_of(tmp_path)["candidates"]) <= 3 * 32


@pytest.mark.long
async def test_a_run_is_selected_from_by_its_folder_and_a_model_with_its_own_temperature(
    tmp_path, random_model_path
):
    def trained():
        run_local(
            runs.config(random_model_path, tmp_path / "runs", "buffer.total_steps=1"),
            workflow=runs.workflow,
            judge=runs.judge,
            train_tasks=runs.TRAIN,
            eval_tasks={"held-out": runs.EVAL},
        )

    await asyncio.to_thread(trained)
    warm = TunerModelConfig(model_path=str(random_model_path), max_model_len=256, temperature=0.7)
    best, metrics = await select(
        tmp_path,
        [tmp_path / "runs/p/run", warm],
        "model.max_response_tokens=4",
        train_dataset=TASKS[:1],
        judge_func=None,
        workflow_func=rewarded,
        project_name="selected",
    )
    assert best == tmp_path / "runs/p/run"  # the first of equals
    assert metrics["tied"] == 1
    files = sorted(tmp_path.glob("selected/*/traces/*"))
    temperatures = [t.calls[0].sampling.temperature for f in files for t in read_traces(f)]
    assert temperatures == [0.0, 0.7]  # what is not said is greedy, as in evaluations
    (result,) = tmp_path.glob("selected/*/result.json")
    names = [one["name"] for one in json.loads(result.read_text())["candidates"]]
    assert names == ["run step 1", random_model_path.name]


async def rewarded(task, model):
    output = await workflow(task, model)
    return WorkflowOutput(response=output.response, reward=1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "give a list of two or more models"),
        ("models/tiny_math", "give a list of two or more models"),
        ([1, 2], r"a candidate is 1 \(int\); pass a chat model of AgentScope"),
        ([MODELS / "tiny_math", MODELS / "tiny_math"], "tiny_math is given twice"),
    ],
)
async def test_what_is_no_candidate_is_refused(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said) as raised:
        await select(tmp_path, given)
    assert isinstance(raised.value, ValueError)  # as AgentScope's
    assert not list(tmp_path.iterdir())


async def test_a_key_that_is_not_there_is_missed_before_anybody_is_asked(tmp_path, chat_model):
    with by_name(one=right) as server:
        keyed = RemoteModel(base_url=server.base_url, model_name="two", api_key_env="NO_SUCH_KEY")
        with pytest.raises(ConfigError, match=r"two\.api_key_env = 'NO_SUCH_KEY'"):
            await select(tmp_path, [chat_model(server, "one"), keyed])
    assert server.requests == []


async def test_a_judge_of_groups_is_refused(tmp_path):
    async def compares(task, responses):
        return [JudgeOutput(reward=0.0) for _ in responses]

    models = [MODELS / "tiny_math", MODELS / "tiny_retry"]
    with pytest.raises(FunctionError, match="judges groups"):
        await select(tmp_path, models, judge_func=compares)


async def test_a_price_of_nobody_and_no_thread_at_all_are_refused(tmp_path):
    models = [MODELS / "tiny_math", MODELS / "tiny_retry"]
    with pytest.raises(ConfigError, match="prices has qwen, but the candidates are tiny_math"):
        await select(tmp_path, models, prices={"qwen": (1.0, 2.0)})
    with pytest.raises(ConfigError, match=r"prices\['tiny_math'\] is 1.0: give the prices"):
        await select(tmp_path, models, prices={"tiny_math": 1.0})
    with pytest.raises(ConfigError, match="max_threads is 0"):
        await select(tmp_path, models, max_threads=0)


def test_the_script_on_the_page_selects_a_model(tmp_path):
    (script,) = blocks("prompts.md", "python", "tests/tools/prompts/test_selection.py")
    (tmp_path / "test.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n' * 20)
    with by_name(small=lambda body: "5", large=lambda body: "4") as server:
        (tmp_path / "main.py").write_text(
            script.replace("http://127.0.0.1:8000/v1", server.base_url)
        )
        printed = forked.script(tmp_path / "main.py")
    assert "small is dropped after 16 tasks" in printed
    assert printed.splitlines()[-1] == "large 1.0"
