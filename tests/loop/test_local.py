"""The loop: what stops it, what it counts, what it writes. A real engine on a random model."""

import asyncio
import io
import json
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.kit import runs
from tuner.config.keys import check_path
from tuner.encoding import displayable
from tuner.errors import ConfigError, FunctionError, ModelLoadError, TrainingError, TunerError
from tuner.loop import run_local
from tuner.rollouts.chat_models import default_kind
from tuner.runs.directory import read_metrics
from tuner.runs.models import load_model, load_tokenizer
from tuner.tasks.functions import JudgeOutput, WorkflowOutput
from tuner.tasks.selection import planned_steps
from tuner.traces import read_traces

TINY_MATH = Path(__file__).parents[2] / "models" / "tiny_math"


def tune(model, root, *overrides, workflow=runs.workflow, judge=runs.judge):
    base = ("tuner.deterministic=false", "buffer.total_steps=2", "explorer.max_retry_times=0")
    return run_local(
        runs.config(model, root, *base, *overrides),
        workflow=workflow,
        judge=judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )


async def failing_workflow(task, model):
    await runs.answer(model, "hi")
    raise LookupError(f"no tool for {task['question']!r}"[:12])


def test_always_failing_workflow_stops_the_run_with_its_error(random_model_path, tmp_path):
    with pytest.raises(TrainingError, match=r"6 of 6 rollouts.*workflow_error: LookupError"):
        tune(
            random_model_path,
            tmp_path,
            "buffer.total_steps=9",
            "tuner.signal_patience=2",
            workflow=failing_workflow,
        )
    rows = (tmp_path / "p/run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1, 2]
    # What was recorded stays.
    assert len(list(read_traces(tmp_path / "p/run/traces/step_000001.jsonl"))) == 6


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1251"])
def test_text_that_utf8_or_the_console_cannot_hold_ends_no_run(
    random_model_path, tmp_path, monkeypatch, encoding
):
    monkeypatch.setattr(logging.getLogger("tuner"), "propagate", False)  # xdist cannot send it
    half = "\ud83d Ж 中"
    task = {half: half, "question": half}

    async def workflow(task, model):
        text = await runs.answer(model, task["question"])
        return WorkflowOutput(response=text + half, metrics={half: 1.0})

    async def judge(task, response):
        if response.index(half) % 2:
            raise ValueError(half)
        return JudgeOutput(reward=float(len(response)), metrics={f"judge {half}": 1.0})

    output = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", output)
    result = run_local(
        runs.config(random_model_path, tmp_path, "buffer.total_steps=1"),
        workflow=workflow,
        judge=judge,
        train_tasks=3 * [task],
        eval_tasks={"held-out": [task]},
    )
    print(result)
    output.flush()
    printed = output.buffer.getvalue().decode(encoding)
    assert displayable(half, encoding) in printed
    found = list(read_traces(tmp_path / "p/run/traces/step_000001.jsonl"))
    assert len(found) == 6
    assert [one.task for one in found] == 6 * [task]
    assert all(one.calls[0].messages[-1]["content"] == half for one in found)
    (row,) = [row for row in result.history if row["step"] == 1]
    assert row[f"workflow/{half}"] == 1.0
    assert read_metrics(tmp_path / "p/run/metrics.jsonl", up_to=1)[-1] == row


@pytest.mark.parametrize(("steps", "counted"), [(1, "The last step"), (2, "2 steps in a row")])
def test_a_short_run_without_an_update_is_not_completed_and_its_first_failure_is_said(
    random_model_path, tmp_path, capsys, steps, counted
):
    with pytest.raises(TrainingError, match=rf"{counted} gave nothing .* 6 of 6 rollouts"):
        tune(
            random_model_path,
            tmp_path,
            f"buffer.total_steps={steps}",
            "explorer.eval_on_startup=false",
            workflow=failing_workflow,
        )
    said = capsys.readouterr().out
    assert said.count("has no reward, workflow_error: LookupError: no tool for") == 1
    assert said.index("has no reward") < said.index("step 1/")
    assert said.count("6 workflow_error") == steps
    assert not (tmp_path / "p/run/result.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("policy", ["template", "keep"])
def test_reasoning_policy_is_recorded_and_its_cost_reported_once(tmp_path, capsys, policy):
    async def two_questions(task, model):
        messages = []
        for question in ("Tom has 3 apples and buys 4 more. How many apples?", "Are you sure?"):
            messages.append({"role": "user", "content": question})
            answer = await model.client.chat.completions.create(
                model=model.model_name, messages=messages, max_tokens=60
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return WorkflowOutput(response=messages[-1]["content"] or "")

    async def judge(task, response):
        return JudgeOutput(reward=float(len(response) % 7))

    tune(
        TINY_MATH,
        tmp_path,
        f"tuner.reasoning={policy}",
        "explorer.eval_on_startup=false",
        "algorithm.optimizer.lr=1e-6",  # the model goes on writing well-formed turns
        workflow=two_questions,
        judge=judge,
    )
    traces = [
        trace
        for step in (1, 2)
        for trace in read_traces(tmp_path / f"p/run/traces/step_{step:06d}.jsonl")
    ]
    pairs = [trace.calls for trace in traces]
    assert all(call.reasoning_policy == policy for pair in pairs for call in pair)
    rows = [json.loads(row) for row in (tmp_path / "p/run/metrics.jsonl").read_text().splitlines()]
    said = capsys.readouterr()
    text = " ".join((said.out + said.err).split())
    if policy == "keep":
        kept = sum(second.kept_reasoning_ids for _, second in pairs)
        assert sum(row["tokens/kept_reasoning"] for row in rows) == kept > 0
        assert all(second.rerendered is None for _, second in pairs)
        assert "tuner.reasoning" not in text
    else:
        again = sum(second.recomputed_ids for _, second in pairs)
        assert sum(row["tokens/recomputed"] for row in rows) == again > 0
        assert text.count("tuner.reasoning: keep puts the reasoning back") == 1
        assert f"{rows[0]['tokens/recomputed']:,} tokens of history" in text


def test_equal_rewards_stop_the_run_with_advice(random_model_path, tmp_path, capsys):
    async def judge(task, response):
        return JudgeOutput(reward=1.0)

    with pytest.raises(TrainingError, match=r"the same reward, 1: .*training uses"):
        tune(random_model_path, tmp_path, "tuner.signal_patience=2", judge=judge)
    said = capsys.readouterr().out.splitlines()
    shown = [n for n, line in enumerate(said) if line.endswith(", reward 1")]
    (first_step,) = (n for n, line in enumerate(said) if line.startswith("step 1/"))
    assert len(shown) == 3
    assert max(shown) < first_step


def test_failed_rollouts_are_dropped_and_counted(random_model_path, tmp_path):
    async def workflow(task, model):
        text = await runs.answer(model, task["question"])
        if sum(map(ord, text)) % 3 == 0:
            raise LookupError("no tool")
        return WorkflowOutput(response=text)

    result = tune(random_model_path, tmp_path, workflow=workflow)
    failed = result.outcomes["workflow_error"]
    assert failed > 0
    assert failed + result.outcomes["completed"] == 12
    assert result.tokens.dropped["workflow_error"] > 0
    assert result.tokens.sampled == result.tokens.trained + sum(result.tokens.dropped.values())


def test_penalized_failures_are_trained(random_model_path, tmp_path):
    tokens = {}

    async def workflow(task, model):
        text = await runs.answer(model, task["question"])
        tokens[text] = None
        if len(tokens) % 2:
            raise LookupError("no tool")
        return WorkflowOutput(response=text)

    result = tune(
        random_model_path, tmp_path, "tuner.on_failure={penalize: -1.0}", workflow=workflow
    )
    assert result.outcomes["workflow_error"] > 0
    assert result.tokens.dropped == {}


def test_abort_raises_at_the_first_failure(random_model_path, tmp_path):
    with pytest.raises(TrainingError, match="on_failure is 'abort'"):
        tune(random_model_path, tmp_path, "tuner.on_failure=abort", workflow=failing_workflow)


def test_wrong_return_type_stops_at_once(random_model_path, tmp_path):
    async def workflow(task, model):
        return ["text"]

    with pytest.raises(FunctionError, match="returns WorkflowOutput"):
        tune(random_model_path, tmp_path, workflow=workflow)


def test_checkpoints_load_and_old_ones_go(random_model_path, tmp_path):
    result = tune(
        random_model_path,
        tmp_path,
        "buffer.total_steps=4",
        "trainer.save_interval=1",
        "trainer.max_checkpoints_to_keep=2",
    )
    names = sorted(path.name for path in result.checkpoint.parent.iterdir())
    assert names == ["step_000003", "step_000004"]
    start = AutoModelForCausalLM.from_pretrained(random_model_path)
    trained = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    pairs = zip(start.parameters(), trained.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_auxiliary_model_is_served_by_name_and_never_recorded(random_model_path, tmp_path):
    names = []

    async def workflow(task, model, auxiliary_models):
        helper = auxiliary_models["helper"]
        names.append((sorted(auxiliary_models), helper.model_name))
        hint = await runs.answer(helper, "a hint please")
        return WorkflowOutput(response=await runs.answer(model, task["question"] + hint[:2]))

    async def judge(task, response, auxiliary_models):
        await runs.answer(auxiliary_models["helper"], response)
        return await runs.judge(task, response)

    helper = f"{{name: helper, model_path: {random_model_path}, max_response_tokens: 3}}"
    result = tune(
        random_model_path,
        tmp_path,
        f"explorer.auxiliary_models=[{helper}]",
        workflow=workflow,
        judge=judge,
    )
    assert names[0] == (["helper"], str(random_model_path))
    for trace in read_traces(result.traces / "step_000001.jsonl"):
        assert len(trace.calls) == 1
        assert trace.calls[0].messages[0]["content"].startswith("train")


class Remote(BaseHTTPRequestHandler):
    """An OpenAI-compatible server with one answer."""

    keys: list[str]

    def do_POST(self):
        self.keys.append(self.headers["Authorization"])
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "remote"},
        }
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "big"}
        data = json.dumps({**body, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def remote():
    Remote.keys = []
    server = HTTPServer(("127.0.0.1", 0), Remote)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_auxiliary_model_behind_a_url(random_model_path, tmp_path, remote, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")

    async def judge(task, response, auxiliary_models):
        assert await runs.answer(auxiliary_models["judge"], "score this") == "remote"
        return await runs.judge(task, response)

    settings = f"{{base_url: '{remote}', model_name: big, api_key_env: JUDGE_KEY}}"
    result = tune(
        random_model_path, tmp_path, f"tuner.auxiliary_models={{judge: {settings}}}", judge=judge
    )
    assert result.outcomes == {"completed": 12}
    assert set(Remote.keys) == {"Bearer secret"}


def test_plain_function_with_a_client_of_its_own_is_trained_over_http(random_model_path, tmp_path):
    """Any framework: a URL and a key are enough, and the key is the rollout."""

    def workflow(task, model):
        client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
        messages = [{"role": "user", "content": task["question"]}]
        answer = client.chat.completions.create(model=model.model_name, messages=messages)
        return WorkflowOutput(response=answer.choices[0].message.content or "")

    result = tune(random_model_path, tmp_path, workflow=workflow)
    assert result.outcomes == {"completed": 12}
    for trace in read_traces(result.traces / "step_000002.jsonl"):
        assert [call.messages[0]["content"] for call in trace.calls] == [trace.task["question"]]


def test_missing_key_of_a_remote_model_is_named(random_model_path, tmp_path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    settings = "{base_url: 'http://127.0.0.1:9/v1', model_name: big, api_key_env: JUDGE_KEY}"
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        tune(random_model_path, tmp_path, f"tuner.auxiliary_models={{judge: {settings}}}")


def test_steps_are_the_full_batches_of_all_epochs(random_model_path, tmp_path):
    config = runs.config(
        random_model_path, tmp_path, "buffer.total_steps=null", "buffer.total_epochs=3"
    )
    assert planned_steps(config, tasks=7) == 10  # 21 tasks in batches of 2


@pytest.mark.parametrize("path", ["no/such/folder", "./missing", "/nowhere"])
def test_missing_model_folder_is_named_with_its_setting(path):
    with pytest.raises(ModelLoadError, match=r"model\.model_path = .*this folder does not exist"):
        load_model(path, device=torch.device("cpu"), dtype=torch.float32)


def test_a_name_that_may_have_been_a_folder_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    looked = rf"no such folder next to the file .*, or in {tmp_path}\) cannot be loaded"
    with pytest.raises(ModelLoadError, match=looked):
        load_tokenizer("models/mine")


def test_a_name_beside_other_models_is_a_folder_that_is_missing(tmp_path, monkeypatch):
    (tmp_path / "models" / "yours").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"folder does not exist \(.*/models has yours\)"):
        load_tokenizer("models/mine")


def test_a_folder_of_the_organisations_name_hides_no_model_of_the_hub(tmp_path, monkeypatch):
    cached = tmp_path / "hub" / "models--Org--there"
    (cached / "snapshots" / "1").mkdir(parents=True)
    (cached / "snapshots" / "1" / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1")
    (tmp_path / "Org").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    check_path("Org/there", "model.model_path")
    with pytest.raises(ModelLoadError, match="this folder does not exist"):
        check_path("Org/elsewhere", "model.model_path")


def test_folder_without_a_model_or_tokenizer_says_so(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be loaded as a language model"):
        load_model(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 5000, '{"base_model_name_or_path": [1]}'])
def test_a_damaged_adapter_is_no_model_in_a_sentence(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(TunerError, match="adapter") as found:
        load_model(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32)
    assert str(tmp_path) in str(found.value)


def test_models_loaded_in_threads_are_whole_and_leave_pytorch_as_it_was(random_model_path):
    before = torch.linspace, torch.nn.init.normal_, PreTrainedModel.tie_weights
    together = threading.Barrier(4)

    def weights(_):
        together.wait()
        path = str(random_model_path)
        model = load_model(path, device=torch.device("cpu"), dtype=torch.float32)
        return [parameter.sum().item() for parameter in model.parameters()]

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(weights, range(40), timeout=60)
    assert others == [first] * 39
    assert before == (torch.linspace, torch.nn.init.normal_, PreTrainedModel.tie_weights)


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_run_in_the_process_is_refused_and_the_next_one_is_not(
    random_model_path, tmp_path, fails
):
    """The second one is started in each rollout of the first."""
    refused = []

    async def workflow(task, model):
        refused.append(await asyncio.to_thread(second))
        if fails:
            raise ValueError("no answer")
        return await runs.workflow(task, model)

    def second():
        with pytest.raises(
            ConfigError, match=r"another tune\(\) is running.*second/p/run"
        ) as found:
            tune(random_model_path, tmp_path / "second")
        return found

    def first():
        tune(random_model_path, tmp_path / "first", "tuner.signal_patience=1", workflow=workflow)

    if fails:
        with pytest.raises(TrainingError, match="no answer"):
            first()
    else:
        first()
    assert refused
    assert not (tmp_path / "second").exists()
    assert tune(random_model_path, tmp_path / "third").status == "completed"


def test_context_longer_than_the_model_is_refused(random_model_path, tmp_path):
    with pytest.raises(ConfigError, match=r"max_model_len = 4096 is more than the 256 positions"):
        tune(random_model_path, tmp_path, "model.max_model_len=4096")


def test_an_answer_as_long_as_the_context_is_refused(random_model_path, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.max_response_tokens = 99999, .* tokens of the"):
        tune(random_model_path, tmp_path, "model.max_response_tokens=99999")


def test_kind_of_chat_model_follows_what_is_installed():
    assert default_kind() == "agentscope1"


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.algorithm_type=raft",),
        ("algorithm.algorithm_type=dapo", "tuner.algorithm.updates=2"),
        ("algorithm.algorithm_type=reinforceplusplus", "algorithm.kl_penalty_fn=k1"),
        ("algorithm.algorithm_type=gspo", "tuner.algorithm.overlong_buffer=3"),
    ],
    ids=lambda overrides: overrides[0].rpartition("=")[2],
)
def test_a_run_with_another_algorithm_trains_and_accounts_for_every_token(
    random_model_path, tmp_path, overrides
):
    result = tune(random_model_path, tmp_path, *overrides)
    assert result.tokens.sampled == result.tokens.trained + sum(result.tokens.dropped.values())
    assert result.tokens.trained > 0
    trained = [row for row in result.history if "train/loss" in row]
    assert all(row["train/stale_fraction"] == 0 for row in trained)
    assert all(row["train/logprob_mismatch_mean"] < 1e-4 for row in trained)
    assert ("not_best_of_group" in result.tokens.dropped) == ("raft" in overrides[0])


def test_evaluation_sets_are_repeated_and_say_how_often_one_and_all_pass(
    random_model_path, tmp_path
):
    result = tune(
        random_model_path,
        tmp_path,
        "buffer.total_steps=1",
        "explorer.eval_on_startup=false",
        "tuner.pass_reward=0.5",
        "buffer.explorer_input.eval_tasksets=[{name: held-out, repeat_times: 3, "
        "rollout_args: {temperature: null}}]",
    )
    traces = list(read_traces(tmp_path / "p/run/traces/held-out_step_000001.jsonl"))
    passed = [
        [trace.reward >= 0.5 for trace in traces if trace.id.task == task] for task in range(2)
    ]
    assert [len(of_task) for of_task in passed] == [3, 3]
    row = result.history[-1]
    assert row["eval/held-out/pass_at_3"] == sum(map(any, passed)) / 2
    assert row["eval/held-out/pass_hat_3"] == sum(map(all, passed)) / 2
    assert result.eval_after == {
        "held-out": pytest.approx(sum(trace.reward for trace in traces) / 6)
    }
