"""A program is an agent: what it gets, what the judge sees of it, and what is left: nothing."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import psutil
import pytest

from tests.kit.toy import StubEngine, gateway_of
from tests.rewards.test_sandbox import those_in
from tuner import JudgeOutput, tune
from tuner.config import load_config
from tuner.environments.containers import ContainerEngine, ContainerLimits
from tuner.environments.program import Program, Workspaces
from tuner.errors import ConfigError, MissingDependencyError, ProgramError
from tuner.rewards import sandbox
from tuner.rollouts.without_framework import PlainChatModel
from tuner.runs.environment import from_settings
from tuner.traces import TraceStore
from tuner.tune import prepare

TASK = {"question": "1 + 1?", "name": "sum"}
FOREVER = "import signal; signal.pause()"


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    """The folder for temporary things; it and the processes that began in it are counted when a
    test has ended."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder
        assert not psutil.wait_procs(those_in(folder), timeout=10)[1]
        assert os.listdir(folder) == []


@pytest.fixture
async def start():
    """Makes programs of Python code, which are closed when the test has ended."""
    made = []

    def start(code, *arguments, **options):
        made.append(Program([sys.executable, "-c", code, *arguments], **options))
        return made[-1]

    yield start
    for one in made:
        await one.close()


class Model(SimpleNamespace):
    """As much of a model as a program hears of."""

    def __init__(self):
        super().__init__(base_url="http://127.0.0.1:65009/v1", api_key="the-key", model_name="tiny")


async def ran(program, task=TASK):
    return (await program.workflow(task, Model())).response


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("stdin", "import sys; print(sys.stdin.read())"),
        ("file:task/PROMPT.md", "print(open('task/PROMPT.md').read())"),
        ("argument", "import sys; print(sys.argv[1])"),
    ],
)
async def test_it_gets_the_prompt_as_it_wants_it(prompt, code, start):
    output = await ran(start(code, "{prompt}", prompt=prompt))
    assert output.stdout == "1 + 1?\n"
    assert output.get_text_content() == "1 + 1?"


async def test_it_finds_the_model_where_clients_look_for_it(start, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = start(
        "import json, os; print(json.dumps(dict(os.environ)))",
        environment={"URL": "at {base_url} for {name}", "JSON": '{"a": 1}'},
    )
    found = json.loads((await ran(program)).stdout)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL"):
        assert found[name] == "http://127.0.0.1:65009/v1"
    assert found["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:65009"
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "LLM_API_KEY"):
        assert found[name] == "the-key"
    for name in ("OPENAI_MODEL", "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"):
        assert found[name] == "tiny"
    assert found["URL"] == "at http://127.0.0.1:65009/v1 for sum"
    assert found["JSON"] == '{"a": 1}'
    assert "HF_TOKEN" not in found


async def test_what_a_task_says_is_not_filled_in_again(start):
    output = await ran(
        start("import sys; print(sys.argv[1])", "{prompt}", prompt="argument"),
        {"question": "{api_key}"},
    )
    assert output.stdout == "{api_key}\n"


async def test_the_judge_sees_files_and_what_was_changed(start, tmp_path):
    (tmp_path / "kept.txt").write_text("one\ntwo\n")
    (tmp_path / "gone.txt").write_text("old\n")
    (tmp_path / "same.txt").write_text("same")
    code = """
import os
open("kept.txt", "a").write("three")
os.remove("gone.txt")
os.makedirs("new")
open("new/made.txt", "w").write("made\\n")
open("binary", "wb").write(b"\\0")
os.symlink("/etc/passwd", "link")
"""
    output = await ran(start(code, template=tmp_path, prompt="file:./PROMPT.md"))
    assert output.files() == ["PROMPT.md", "binary", "kept.txt", "same.txt", "new/made.txt"]
    assert output.text("kept.txt") == "one\ntwo\nthree"
    assert output.text("link") is None
    assert output.text("../template-0/gone.txt") is None
    assert output.text("not there") is None
    assert output.diff() == (
        "Binary files /dev/null and b/binary differ\n"
        "--- a/gone.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-old\n"
        "--- a/kept.txt\n+++ b/kept.txt\n@@ -1,2 +1,3 @@\n one\n two\n+three\n"
        "\\ No newline at end of file\n"
        "--- /dev/null\n+++ b/new/made.txt\n@@ -0,0 +1 @@\n+made\n"
    )
    assert (tmp_path / "kept.txt").read_text() == "one\ntwo\n"


async def test_a_large_file_is_compared_and_not_read_at_once(start, tmp_path, monkeypatch):
    for name in ("same.txt", "changed.txt"):
        (tmp_path / name).write_text("x" * 1_200_000)
    code = "open('changed.txt', 'a').write('y'); open('made.txt', 'w').write('z' * 1_200_000)"
    task = {"question": "1 + 1?" * 300_000}
    output = await ran(start(code, template=tmp_path, prompt="file:PROMPT.md"), task)
    monkeypatch.delattr("pathlib.Path.read_bytes")
    assert output.diff() == (
        "Binary files a/changed.txt and b/changed.txt differ\n"
        "Binary files /dev/null and b/made.txt differ\n"
    )


async def test_rollouts_do_not_see_each_other(start, tmp_path):
    code = "import os; print(os.listdir()); open('mine', 'w').write('x')"
    program = start(code, template=tmp_path)
    outputs = await asyncio.gather(*(ran(program) for _ in range(4)))
    assert [output.stdout for output in outputs] == ["[]\n"] * 4
    assert len({output.folder for output in outputs}) == 4


async def test_a_folder_is_there_as_long_as_the_response_is(start):
    program = start("open('x', 'w').write('left')")
    output = await ran(program)
    folder = output.folder
    assert output.text("x") == "left"
    del output
    gc.collect()
    program._workspaces._remover.submit(lambda: None).result()  # until it has been at it
    assert not folder.exists()


def test_folders_of_a_killed_process_are_removed_at_the_next_start(temporary):
    code = """
import os, sys, tempfile
from tuner.environments.program import Workspaces
tempfile.tempdir = sys.argv[1]
kept = Workspaces()
kept.new(None, None)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code, temporary], check=False)
    (left,) = os.listdir(temporary)
    spaces = Workspaces()
    spaces.new(None, None)
    assert left not in os.listdir(temporary)
    spaces.close()


def git(*arguments, cwd):
    return subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        cwd=cwd,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """Two commits; what is in the work tree is of neither."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git("init", "--quiet", "--initial-branch=main", cwd=folder)
    for text in ("first", "second"):
        (folder / "file").write_text(text)
        git("add", "file", cwd=folder)
        git("commit", "--quiet", "-m", text, cwd=folder)
    (folder / "file").write_text("not committed")
    return folder


async def test_it_works_in_a_commit_of_a_repository(start, repository):
    first = git("rev-parse", "HEAD~1", cwd=repository)
    code = """
import subprocess
print(open("file").read())
open("file", "w").write("changed")
print(subprocess.run(["git", "diff", "--stat"], capture_output=True, text=True).stdout)
"""
    program = start(code, template=str(repository), commit="{commit}")
    for commit in (first, first[:8], "main~1"):
        output = await ran(program, {**TASK, "commit": commit})
        assert output.stdout.startswith("first\n file | 2 +-"), output.stderr
        assert "-first" in output.diff()
    assert git("status", "--short", cwd=repository) == "M file"
    assert git("rev-parse", "HEAD~1", cwd=repository) == first
    with pytest.raises(ConfigError, match=r"git .* failed"):
        await ran(program, {**TASK, "commit": "nowhere"})


@pytest.mark.parametrize(
    ("code", "limits", "message"),
    [
        (FOREVER, {"seconds": 0.3}, "ran for longer than 0.3 s"),
        ("while True: print('x' * 1000)", {"output_bytes": 5000}, "wrote more than 5000 bytes"),
        (f"open('x', 'wb').write(bytes(2**23))\n{FOREVER}", {"disk_mb": 2}, "disk than 2 MiB|Err"),
        (f"import os\nfor _ in range(5): os.fork()\n{FOREVER}", {"processes": 8}, "processes"),
        (f"x = b'x' * 2**27\n{FOREVER}", {"memory_mb": 96}, "more memory than 96 MiB"),
        ("raise SystemExit('I give up')", {}, "ended with 1: I give up"),
    ],
)
async def test_what_fails_is_an_error_and_no_response(code, limits, message, start, temporary):
    program = start(code, limits=limits)
    with pytest.raises(ProgramError, match=message):
        await ran(program)


async def test_any_exit_status_may_be_the_judges_business(start):
    output = await ran(start("print('x'); raise SystemExit(3)", statuses=None))
    assert (output.status, output.stdout) == (3, "x\n")


async def test_the_folder_of_a_failure_is_kept_where_it_is_wished(start, tmp_path):
    program = start("open('x', 'w').write('left'); raise SystemExit(1)", keep=tmp_path / "kept")
    with pytest.raises(ProgramError, match=r"its folder is kept in .*kept") as raised:
        await ran(program)
    (folder,) = (tmp_path / "kept").iterdir()
    assert (folder / "x").read_text() == "left"
    assert str(folder) in str(raised.value)


async def test_it_ends_with_its_rollout(start, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = f"import os, sys\nopen(sys.argv[1], 'w').write('begun')\nos.fork()\n{FOREVER}"
    program = start(code, str(tmp_path / "pipe"), isolation="process")
    before = {*psutil.Process().children(recursive=True)}
    rollout = asyncio.create_task(ran(program))
    assert await asyncio.to_thread((tmp_path / "pipe").read_text) == "begun"
    below = {*psutil.Process().children(recursive=True)} - before
    assert len(below) >= 2
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert not any(process.is_running() for process in below)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": "node agent.js"}, "command is 'node agent.js'.*give a list"),
        ({"command": []}, "command is "),
        ({"command": ["a"], "prompt": "argument"}, "no word of command has {prompt}"),
        ({"command": ["a"], "prompt": "pipe"}, "prompt is 'pipe'"),
        ({"command": ["a"], "prompt": "file:../PROMPT.md"}, "in its folder"),
        ({"command": ["a"], "template": "/not/there"}, "no such folder"),
        ({"command": ["a"], "commit": "main"}, "commit is set without template"),
        ({"command": ["a"], "template": "/", "commit": "main"}, "git .* failed"),
        ({"command": ["a"], "network": "some"}, "network is 'some'"),
        ({"command": ["a"], "limits": {"second": 1}}, "limits has no 'second'"),
        ({"command": ["a"], "limits": {"seconds": 0}}, "a limit must be above 0"),
    ],
)
def test_what_is_wrong_is_said_before_any_rollout(options, message):
    with pytest.raises(ConfigError, match=message):
        Program(**options)


def test_the_file_has_paths_from_its_folder(tmp_path, monkeypatch):
    (tmp_path / "agent").mkdir()
    (tmp_path / "judging.py").write_text("async def judge(task, response): ...\n")
    (tmp_path / "run.yaml").write_text(
        """
tuner:
  environment:
    kind: program
    command: [node, agent.mjs, "{prompt}"]
    prompt: argument
    template: agent
    keep: kept
    readable: [data]
    judge: judging.py:judge
    limits: {seconds: 9}
"""
    )
    monkeypatch.chdir("/")
    section = load_config(tmp_path / "run.yaml").tuner.environment
    program = from_settings(section, "tuner.environment")
    assert program._template == str(tmp_path / "agent")
    assert program._keep == tmp_path / "kept"
    assert program._readable == [tmp_path / "data"]
    assert program.judge.__name__ == "judge"
    assert (program.limits.seconds, program.limits.processes) == (9, 64)
    rows = [{"question": f"{n} + 1?"} for n in range(8)]
    file, few = tmp_path / "run.yaml", ["buffer.batch_size=4", "buffer.total_steps=1"]
    run = prepare(environment=program, train_dataset=rows, config_path=file, overrides=few)
    assert run.config.concurrent_rollouts == 8  # 32 without processes
    assert run.judge is program.judge
    assert run.config.tuner.judge is None  # it is named by the environment


ASKS = """
import json, os, sys, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(said)
"""


async def test_what_it_asks_with_its_key_is_the_rollouts(start):
    async with gateway_of(StubEngine(["forty-two"])) as gateway:
        session = gateway.open_session("r")
        output = await start(ASKS).workflow(TASK, PlainChatModel(session))
        assert output.response.text("answer.txt") == "forty-two"
        (call,) = session.seal()
    assert call.response["content"] == "forty-two"


# Fails in the way that the task asks for, or asks the model.
TROUBLE = (
    """
import os, signal, sys
how = sys.stdin.read()
if how == "hangs":
    if not os.fork():
        os.setsid()
    signal.pause()
if how == "fails":
    raise SystemExit("I give up")
if how == "forks":
    for _ in range(6): os.fork()
    signal.pause()
if how == "floods":
    while True: print("x" * 1000)
"""
    + ASKS
)


def judge(task, response):
    if task["question"] == "judge fails":
        raise ValueError("no idea")
    return JudgeOutput(reward=float("e" in response.text("answer.txt")))


@pytest.mark.long
def test_each_failure_is_an_outcome_and_training_goes_on(random_model_path, tmp_path, start):
    ways = ["hangs", "fails", "forks", "floods", "judge fails", "works", "works too", "works so"]
    program = start(
        TROUBLE,
        judge=judge,
        train_dataset=[{"question": how} for how in ways],
        limits={"seconds": 5, "processes": 8, "output_bytes": 100_000},
    )
    result = tune(
        environment=program,
        overrides=[
            f"model.model_path={random_model_path}",
            f"checkpoint_root_dir={tmp_path}",
            "project=p",
            "name=n",
            *("buffer.batch_size=8", "buffer.total_steps=1", "algorithm.repeat_times=2"),
            *("model.max_response_tokens=16", "explorer.max_retry_times=0"),
        ],
    )
    assert result.outcomes == {"workflow_error": 8, "judge_error": 2, "completed": 6}
    store = TraceStore(tmp_path / "p" / "n" / "traces")
    errors = {trace.task["question"]: trace.error or "" for trace in store.read("train", 1)}
    for how, message in {
        "hangs": "ran for longer than 5 s (limits.seconds)",
        "fails": "ended with 1: I give up",
        "forks": "ran more processes than 8 (limits.processes)",
        "floods": "wrote more than 100000 bytes (limits.output_bytes)",
        "judge fails": "no idea",
    }.items():
        assert message in errors[how]


def test_values_of_variables_stay_out_of_the_list_of_processes(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    given = {"OPENAI_API_KEY": "the-key", "HOME": "/tmp", "https_proxy": "a:1"}
    engine = ContainerEngine(ContainerLimits())
    words, own = engine.exec_words("box", ["node"], environment=given)
    assert words == [
        *("exec", "--env=OPENAI_API_KEY", "--env=HOME=/tmp", "--env=https_proxy=a:1", "box", "node")
    ]
    assert own == {"OPENAI_API_KEY": "the-key"}  # the client itself reads the other two


def test_a_container_that_cannot_be_started_is_refused_at_once(monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = "'agents:1' can be started: podman is not installed; docker is not installed"
    with pytest.raises(MissingDependencyError, match=said):
        Program(["a"], image="agents:1")


@pytest.mark.skipif(sandbox.available() != "bubblewrap", reason="bubblewrap does not work here")
async def test_it_sees_no_files_of_ours_but_those_it_is_shown(start, tmp_path):
    (tmp_path / "token").write_text("secret")
    code = "import os, sys; print(os.path.exists(sys.argv[1]))"
    path = str(tmp_path / "token")
    assert (await ran(start(code, path))).stdout == "False\n"
    assert (await ran(start(code, path, readable=[path]))).stdout == "True\n"
