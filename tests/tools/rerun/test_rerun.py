"""`tuner rerun`: a recorded rollout once more, in this process, without a model."""

import asyncio
import re
import shutil

import pytest

from tests.kit import runs
from tests.tools.rerun import agents
from tuner.errors import TunerError
from tuner.loop import run_local
from tuner.testing import Replayed, save_rollouts
from tuner.tools.rerun import run_again
from tuner.traces import RolloutId, read_traces
from tuner.traces.store import read_rollouts


@pytest.fixture
def made(make_run, capsys):
    """`make_run`, from a test that is no coroutine: commands have an event loop of their own."""

    def make(*arguments, **options):
        run = asyncio.run(make_run(*arguments, **options))
        capsys.readouterr()
        return run

    return make


def test_a_rollout_is_given_back_without_a_model(made, said):
    run = made()
    status, output, errors = said("rerun", run, "train-3-0-2")
    assert (status, errors) == (0, "")
    assert "an answer came: It is 5.\n" in output  # what the agent prints is seen
    assert "all 3 calls were replayed, as recorded" in output
    assert "answer  'yes' as recorded" in output
    assert "reward  1 as recorded" in output
    assert agents.DID == ["add 2 3"]  # the tool ran again, and what is recorded did not


def test_a_blocking_client_over_http(made, said):
    run = made("plain", texts=["one", "two"])
    status, output, _ = said("rerun", run, "train-3-0-2-1")
    assert status == 0
    assert "all 2 calls were replayed" in output
    assert "answer  'one two' as recorded" in output
    assert agents.DID == ["plain"]


def test_an_agent_of_agentscope_with_tools(made, said):
    pytest.importorskip("agentscope")
    run = made("react", kind="agentscope1", texts=[agents.call(2, 3), "It is 5, yes."])
    status, output, _ = said("rerun", run, "train-3-0-2")
    assert status == 0
    assert "all 2 calls were replayed" in output
    assert agents.DID == ["add 2 3"]
    agents.CLOCK[0] = "10:42"
    status, output, _ = said("rerun", run, "train-3-0-2")
    assert status == 1
    assert "-  You add. It is 10:41." in output
    assert "+  You add. It is 10:42." in output


@pytest.mark.parametrize(("call", "done"), [(1, []), (2, ["add 2 3"]), (3, ["add 2 3"])])
def test_it_ends_where_a_call_is_asked_for(call, done, made, said):
    status, output, _ = said("rerun", made(), "train-3-0-2", "--until", call)
    assert status == 0
    assert f"train-3-0-2: call {call} of 3 was requested, as recorded; stopped" in output
    assert "answer  " not in output
    assert done == agents.DID if call < 3 else [*done, "price pen"]


def test_a_blocking_agent_ends_there_too(made, said):
    status, output, _ = said("rerun", made("plain"), "train-3-0-2", "--until", 2)
    assert status == 0
    assert "call 2 of 2 was requested" in output
    assert agents.DID == []


def test_a_call_behind_the_point_may_be_asked_for_first(made, said, monkeypatch):
    run = made("pair", texts=["a", "yes"])
    monkeypatch.setattr(agents, "PAIR", ["second", "first"])
    status, output, _ = said("rerun", run, "train-3-0-2", "--until", 1)
    assert status == 0
    assert "call 1 of 2 was requested" in output
    assert agents.DID == ["asks second", "asks first"]


def test_a_divergence_is_a_diff_of_the_requests(made, said):
    run = made()
    agents.CLOCK[0] = "10:42"
    status, output, errors = said("rerun", run, "train-3-0-2")
    assert (status, errors) == (1, "")
    lines = output.splitlines()
    assert re.match(
        r"train-3-0-2 diverges at call 1 of 3: messages\[0\]\.content is .*10:42.* was .*10:41",
        lines[0],
    )
    assert re.fullmatch(r"asked for in workflow \(.*tests/tools/rerun/agents\.py:\d+\)", lines[1])
    assert lines[2:] == [
        "--- call 1 as recorded",
        "+++ asked for now",
        "@@ -1,5 +1,5 @@",
        " [system]",
        "-  Be kind. It is 10:41.",
        "+  Be kind. It is 10:42.",
        " [user]",
        "   2+3?",
        " [tool add]",
    ]


def test_an_agent_that_hides_its_errors_has_diverged_all_the_same(made, said):
    run = made()
    agents.CLOCK[0] = "10:42"
    where = "tests.tools.rerun.agents:impatient"
    status, output, _ = said("rerun", run, "train-3-0-2", "--workflow", where)
    assert status == 1
    assert output.startswith("train-3-0-2 diverges at call 1 of 3")
    assert "answer" not in output


def test_an_agent_that_ends_early(made, said):
    where = "tests.tools.rerun.agents:says_yes"
    status, output, _ = said("rerun", made("plain"), "train-3-0-2", "--workflow", where)
    assert status == 1
    assert "diverges at call 1 of 2: the agent ended without asking for it" in output
    assert "+++ the agent has ended" in output


def test_another_answer_is_a_finding(made, said):
    where = "tests.tools.rerun.agents:another_answer"
    status, output, _ = said("rerun", made(), "train-3-0-2", "--workflow", where)
    assert status == 1
    assert "answer  differs:" in output
    assert "-yes\n+yes!\n" in output
    assert "reward  1 as recorded" in output


def test_what_the_workflow_raises_is_shown_with_its_traceback(made, said):
    where = "tests.tools.rerun.agents:fails"
    status, output, _ = said("rerun", made(), "train-3-0-2", "--workflow", where)
    assert status == 1
    assert 'raise ValueError("the tool is broken")' in output
    assert "the workflow failed, but not when it was recorded" in output


def test_a_failure_that_was_recorded_is_the_same_again(made, said):
    status, output, _ = said("rerun", made("fails"), "train-3-0-2")
    assert status == 0
    assert "the workflow failed, as recorded" in output


def test_another_judge_and_no_judge(made, said):
    run = made()
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        text.replace("judge: tests.tools.rerun.agents:judge", "judge: null")
    )
    status, output, _ = said("rerun", run, "train-3-0-2")
    assert status == 0
    assert "reward  not compared: the run names no judge: add --judge" in output
    status, output, _ = said(
        "rerun", run, "train-3-0-2", "--judge", "tests.tools.rerun.agents:strict"
    )
    assert status == 1
    assert "reward  0, recorded was 1" in output


def test_a_model_behind_a_url_is_given_back_by_messages(made, said, no_weights):
    run = made("plain", texts=["one", "yes"], relayed=True)
    (trace,) = read_traces(run / "traces/step_000003.jsonl")
    assert trace.calls[0].billed is not None
    status, output, _ = said("rerun", run, "train-3-0-2")
    assert status == 0
    assert "all 2 calls were replayed" in output
    status, output, _ = said("rerun", run, "train-3-0-2", "--until", "2")
    assert (status, "call 2 of 2 was requested" in output) == (0, True)
    status, _, errors = said("rerun", run, "train-3-0-2", "--sample")
    assert status == 2
    assert "whose address is not in the run: omit --sample" in errors


def test_the_prompts_of_a_search_are_those_of_its_candidate(made, said):
    run = made("prompted", texts=["yes"])
    (run / "candidates.jsonl").write_text(
        '{"number": 1, "prompts": {"system_prompt": "You are number 1."}}\n'
        '{"number": 3, "prompts": {"system_prompt": "You are number 3."}}\n'
    )
    where = "tests.tools.rerun.agents:prompted"
    status, output, _ = said("rerun", run, "train-3-0-2", "--workflow", where)
    assert status == 0, output
    assert "answer  'yes' as recorded" in output


async def helper(text):
    return f"hint for {text}"


@pytest.mark.parametrize("question", ["once", "twice"])
def test_an_auxiliary_model_is_asked_by_what_was_recorded_or_not_at_all(question, made, said):
    models = "tuner.auxiliary_models={helper: {base_url: 'http://127.0.0.1:9/v1', model_name: m}}"
    run = made("helped", models, texts=["yes"], question=question, auxiliary={"helper": helper})
    status, output, errors = said("rerun", run, "train-3-0-2")
    if question == "once":
        assert status == 0
        assert "answer  'hint for once' as recorded" in output
    else:
        assert status == 2
        assert "the auxiliary model 'helper' was called, but no model is loaded" in errors


def test_functions_draw_the_random_numbers_that_they_drew(made, said):
    run = made("draws", "tuner.deterministic=true", texts=["yes"])
    status, output, _ = said("rerun", run, "train-3-0-2")
    assert status == 0, output
    assert "the only call was replayed" in output


@pytest.mark.long
def test_a_whole_rollout_is_saved_for_tests(made, said, tmp_path):
    run, file = made(), tmp_path / "tests" / "rollouts.jsonl"
    for name in ("sum", "sum", "other"):
        status, output, _ = said("rerun", run, "train-3-0-2", "--save", file, "--name", name)
        assert status == 0
        assert f"saved   {file}: {name}" in output
    saved = read_rollouts(file)
    assert list(saved) == ["sum", "other"]
    assert saved["sum"].trace.response == "yes"
    assert saved["sum"].context == 8192
    assert saved["sum"].defaults["max_tokens"] == 500
    agents.CLOCK[0] = "10:42"
    status, _, _ = said("rerun", run, "train-3-0-2", "--save", file, "--name", "third")
    assert (status, list(read_rollouts(file))) == (1, ["sum", "other"])


async def test_what_was_saved_of_a_run_is_replayed_by_the_fixture(make_run, tmp_path):
    """Without the run, its tokenizer or its model: in every dialect that its gateway speaks."""
    file = tmp_path / "rollouts.jsonl"
    for name in ("workflow", "dialects"):
        run = await make_run(name)
        save_rollouts(run, {name: "train-3-0-2"}, file)
        shutil.rmtree(run)
    for name in ("workflow", "dialects"):
        agents.DID.clear()
        output = await Replayed(file, "a test")(getattr(agents, name), name)
        assert output.response == "yes"
        assert "price pen" not in agents.DID
    agents.CLOCK[0] = "10:42"
    with pytest.raises(
        pytest.fail.Exception, match="leaves the rollout 'workflow' at call 1: mess"
    ):
        await Replayed(file, "workflow")(agents.workflow)


async def test_another_rollout_of_a_name_is_not_overwritten(make_run, tmp_path):
    file = tmp_path / "rollouts.jsonl"
    for texts in (["a", "b"], ["c", "d"]):
        run = await make_run("plain", texts=texts)
        if texts[0] == "a":
            save_rollouts(run, ["train-3-0-2"], file)
            shutil.rmtree(run)
    with pytest.raises(TunerError, match="already has a different rollout 'train-3-0-2': choose"):
        save_rollouts(run, ["train-3-0-2"], file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train-3-0-9"], "has no rollout train-3-0-9; those of its step: train-3-0-2"),
        (["train-4-0-0"], "and nothing of step 4"),
        (["train-3-0-2-2"], "has no rollout train-3-0-2-2"),
        (["first"], "'first' is not the name of a rollout: write <split>-<step>"),
        (["train-3-0-2", "--until", "4"], "--until is 4, and train-3-0-2 has 3 calls: give 1 to 3"),
        (["train-3-0-2", "--seed", "4"], "add --sample"),
        (["train-3-0-2", "--until", "1", "--save", "f"], "--save is for whole rollouts"),
        (["train-3-0-2", "--workflow", "agents"], "--workflow is 'agents': write package.module"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments, message, made, said):
    status, _, errors = said("rerun", made(), *arguments)
    assert status == 2
    assert message in errors


def test_what_is_no_run_is_refused(said, tmp_path):
    status, _, errors = said("rerun", tmp_path, "train-1-0-0")
    assert status == 2
    assert "is not a run: give the folder" in errors


def test_splits_and_attempts_may_look_alike(made):
    """`held-1-2-3-4` is attempt 4 of a rollout of `held`, or one of `held-1`."""

    run = made("plain", texts=["a", "yes"], id=RolloutId(2, 3, 4, "held-1"))
    assert run_again(run, "held-1-2-3-4").well
    assert run_again(run / "traces/held-1_step_000002.jsonl", "held-1-2-3-4-1").well


def test_a_file_of_traces_stands_for_its_run(made):
    run = made("plain", texts=["one", "yes"])
    found = run_again(run / "traces/step_000003.jsonl", "train-3-0-2", workflow=agents.plain)
    assert found.well
    assert found.response == "one yes"
    assert all(call.replayed == len(call.completion_ids) for call in found.calls)


# With a model


@pytest.fixture(scope="module")
def trained(random_model_path, tmp_path_factory):
    """A run of one step, whose workflow asks twice."""
    root = tmp_path_factory.mktemp("runs")
    config = runs.config(
        random_model_path,
        root,
        "buffer.total_steps=1",
        "tuner.deterministic=false",
        "tuner.workflow=tests.tools.rerun.agents:plain",
        "tuner.judge=tests.tools.rerun.agents:judge",
    )
    run_local(
        config,
        workflow=agents.plain,
        judge=agents.judge,
        train_tasks=runs.TRAIN,
        eval_tasks={"held-out": runs.EVAL},
    )
    return config.run_dir


@pytest.mark.long
def test_behind_the_point_the_runs_newest_model_goes_on(trained, said):
    status, output, _ = said("rerun", trained, "train-1-0-1", "--until", 2, "--sample")
    assert status == 0
    lines = output.splitlines()
    assert lines[0].startswith("call 1  replayed: ")
    assert re.match(r"call 2  sampled, \d tokens: ", lines[1])
    assert "reward  " in output
    same = said("rerun", trained, "train-1-0-1", "--until", 2, "--sample")[1]
    other = said("rerun", trained, "train-1-0-1", "--until", 2, "--sample", "--seed", 1)[1]
    assert same == output != other


def test_a_named_model_goes_on_where_the_agent_diverged(trained, said, random_model_path):
    options = ["--sample", "-c", random_model_path, "--workflow", "tests.tools.rerun.agents:shouts"]
    status, output, _ = said("rerun", trained, "held-out-1-0-0", *options)
    assert status == 0
    assert "call 1  sampled" in output
    assert "held-out-1-0-0 diverges at call 1 of 2" in output
    assert "+  EVAL 0" in output


def test_an_evaluations_rollouts_have_its_settings(trained):
    """They are greedy, and those of training are not."""
    assert run_again(trained, "held-out-1-0-0").well
    assert run_again(trained, "train-1-1-0").well
