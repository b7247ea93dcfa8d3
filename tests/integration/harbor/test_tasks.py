"""Tasks in Harbor's format run in real containers, and their tests are the judge."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import harbor as harbors_package
import pytest

from tests.integration.harbor.conftest import IMAGE, PROGRAM, TASKS, Model, podman
from tests.kit.toy import StubEngine, gateway_of
from tuner.environments import Harbor
from tuner.environments.containers import given_limits
from tuner.errors import ConfigError, ProgramError, RewardError, RewardTimeout, SandboxError
from tuner.rollouts.without_framework import PlainChatModel
from tuner.runs.environment import brought, from_settings

NAMES = sorted(path.name for path in TASKS.iterdir())


async def idle(task, terminal, model):
    """An agent that does nothing."""


async def name_of(task, terminal, model):
    """An agent that says in which container it was."""
    return terminal.environment.container


async def shown_containers(count):
    """Names of the containers, once there are that many."""
    async with asyncio.timeout(20):
        # podman has no event to wait for.
        while len(names := podman("ps", "-a", "--format", "{{.Names}}").split()) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return names


async def rewarded(environment, row=None, model=None):
    row = row or environment.train_dataset[0]
    output = await environment.workflow(row, model or Model())
    return output, await environment.judge(row, output.response)


@pytest.mark.parametrize("name", NAMES)
async def test_a_solution_is_rewarded_and_doing_nothing_is_not(name, harbor):
    _, solved = await rewarded(harbor(TASKS / name, agent="oracle"))
    assert (solved.reward, solved.feedback) == (1, None)
    _, failed = await rewarded(harbor(TASKS / name, agent="nop"))
    assert failed.reward < 1
    assert failed.feedback


def called(name, **arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


SCRIPTS = {
    "broken_script": ["cat total.py", (TASKS / "broken_script/solution/solve.sh").read_text()],
    "greeting": ["echo hello > greeting.txt"],
    "oldest_ship": ["cat ships/*", "echo Pelican > answer.txt"],
}


@pytest.mark.parametrize("name", NAMES)
async def test_a_model_solves_it_with_two_tools(name, harbor):
    environment = harbor(TASKS / name)

    def answer(prompt, sampling):
        done = prompt.count("<tool_response>")
        commands = SCRIPTS[name]
        return called("bash", command=commands[done]) if done < len(commands) else called("submit")

    async with gateway_of(StubEngine(max_model_len=100_000, answer=answer)) as gateway:
        session = gateway.open_session("rollout")
        _, judged = await rewarded(environment, model=PlainChatModel(session))
        calls = session.seal()
    assert judged.reward == 1
    assert len(calls) == len(SCRIPTS[name]) + 1
    if name == "oldest_ship":
        assert judged.metrics == {"reward_answered": 1}
        assert "name: Pelican" in calls[1].messages[-1]["content"]


async def test_a_program_in_the_container_reaches_the_model_and_nothing_else(task_of, harbor):
    environment = harbor(task_of(), agent=["bash", "-c", PROGRAM.replace("{prompt}", "greet")])
    async with gateway_of(StubEngine(["hello"])) as gateway:
        session = gateway.open_session("rollout")
        output, judged = await rewarded(environment, model=PlainChatModel(session))
        calls = session.seal()
    assert (judged.reward, len(calls)) == (1, 1), output
    assert output.response.said == "1"  # the loopback is all of its network


async def test_a_program_that_fails_is_no_answer(task_of, harbor):
    environment = harbor(task_of(), agent=["bash", "-c", "echo why >&2; exit 3"])
    with pytest.raises(ProgramError, match="bash ended with 3: why"):
        await rewarded(environment)


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("echo looked", "No reward file.*looked"),
        ("echo much >/logs/verifier/reward.txt", "much|parse"),
        ("echo nan >/logs/verifier/reward.txt", "[Nn]on-finite"),
        (": >/logs/verifier/reward.txt", "empty"),
        ('echo \'{"reward": "x"}\' >/logs/verifier/reward.json', "Non-numeric"),
        ("echo '[1]' >/logs/verifier/reward.json", "no reward"),
        ('echo \'{"a": 1, "b": 2}\' >/logs/verifier/reward.json', "a, b: set reward"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "no reward"),
        (
            "head -c 100000000 /dev/zero >/logs/verifier/log",
            "larger",
        ),
    ],
)
async def test_tests_without_a_reward_are_an_error_of_the_judge(tests, said, task_of, harbor):
    environment = harbor(task_of(tests), agent=idle)
    row = environment.train_dataset[0]
    output = await environment.workflow(row, Model())
    for _ in range(2):  # a judge that failed is asked again
        with pytest.raises(RewardError, match=f"(?s){said}"):
            await environment.judge(row, output.response)


async def test_each_has_its_time(task_of, harbor):
    async def slow(task, terminal, model):
        await terminal.run("sleep 100; touch late")

    folder = task_of("sleep 100", agent="timeout_sec = 1.0", verifier="timeout_sec = 1.0")
    environment = harbor(folder, agent=slow)
    row = environment.train_dataset[0]
    output = await environment.workflow(row, Model())
    assert output.metrics["agent_timeout"] == 1
    with pytest.raises(RewardTimeout, match=r"longer than 1 s \(verifier.timeout_sec\)"):
        await environment.judge(row, output.response)


async def test_what_a_command_may_use_is_limited(task_of, harbor):
    async def greedy(task, terminal, model):
        hog = "python3 -c 'x = bytearray(400 * 2**20)'"
        return [
            (await terminal.run(hog)).return_code,
            (await terminal.run("sleep 100 & sleep 100", timeout=1)).return_code,
            (await terminal.run("for i in $(seq 64); do sleep 9 & done")).stderr.count("fork"),
            len((await terminal.run("yes | head -c 9000000")).stdout),
            (await terminal.run("echo $((1+1))")).stdout,
        ]

    environment = harbor(task_of(), agent=greedy, limits={"processes": 32})
    output, _ = await rewarded(environment)
    memory, late, forks, length, after = json.loads(output.response.said.replace("'", '"'))
    assert (memory, late, length, after) == (137, 137, 1_000_000, "2\n")
    assert forks > 0


async def test_a_terminal_reads_and_writes_files(task_of, harbor):
    async def agent(task, terminal, model):
        await terminal.write("/app/a b/c.txt", "ä\n")
        await terminal.write("/app/greeting.txt", "hello\n")
        return (await terminal.read("/app/a b/c.txt")) + (
            await terminal.run("cat 'a b/c.txt'")
        ).stdout

    output, judged = await rewarded(harbor(task_of(), agent=agent))
    assert (output.response.said, judged.reward) == ("ä\nä\n", 1)


async def test_a_container_is_used_again_only_if_its_task_says_so(task_of, harbor):
    for settings, count in (({}, 3), ({"metadata": "reuse = true"}, 1)):
        folder = task_of("echo 1 >/logs/verifier/reward.txt", **settings)
        environment = harbor(folder, agent=name_of)
        names = [(await rewarded(environment))[0].response.said for _ in range(3)]
        assert len(set(names)) == count, settings
        await environment.close()


async def test_the_next_container_is_started_ahead(task_of, harbor):
    environment = harbor(task_of("echo 1 >/logs/verifier/reward.txt"), agent=name_of, ahead=1)
    await rewarded(environment)
    (there,) = await shown_containers(1)
    output, _ = await rewarded(environment)
    assert output.response.said == there


async def test_a_response_that_is_dropped_takes_its_container_along(task_of, harbor):
    environment = harbor(task_of(), agent=idle, ahead=0)
    await environment.workflow(environment.train_dataset[0], Model())
    await shown_containers(0)
    with pytest.raises(RewardError, match="only during the rollout"):
        await environment.judge(environment.train_dataset[0], "a text of the trace")


async def test_an_environment_that_is_closed_leaves_another_alone(task_of, harbor):
    first, second = (harbor(task_of("echo 1 >/logs/verifier/reward.txt"), agent=idle) for _ in "ab")
    row = first.train_dataset[0]
    outputs = [await one.workflow(row, Model()) for one in (first, second)]
    await first.close()
    assert (await second.judge(row, outputs[1].response)).reward == 1


async def test_many_at_once_and_some_cancelled(task_of, harbor):
    async def agent(task, terminal, model):
        await terminal.run("sleep 0.2; echo hello >greeting.txt")

    environment = harbor(task_of(), agent=agent)
    running = [asyncio.ensure_future(rewarded(environment)) for _ in range(6)]
    for number, delay in ((0, 0.1), (2, 0.6), (4, 0.6)):
        await asyncio.sleep(delay)
        running[number].cancel()
    done = await asyncio.gather(*running, return_exceptions=True)
    kept = [found for number, found in enumerate(done) if number not in (0, 2, 4)]
    assert [judged.reward for _, judged in kept] == [1, 1, 1]


@pytest.fixture
def ubuntu():
    """The image that Harbor's template names, which no registry is asked for."""
    podman("tag", IMAGE, "docker.io/library/ubuntu:24.04")
    yield
    podman("untag", IMAGE, "docker.io/library/ubuntu:24.04")


async def test_harbors_own_template_runs_unchanged(ubuntu, harbor):
    template = Path(harbors_package.__file__).parent / "cli" / "template-task"
    environment = harbor(template, agent="oracle")
    assert environment.train_dataset == [
        {"task": "template-task", "folder": str(template), "instruction": ""}
    ]
    with pytest.raises(RewardError, match="RewardFileNotFoundError"):
        await rewarded(environment)


@pytest.mark.parametrize(
    ("section", "lines", "said"),
    [
        ("environment", "memory_mb = 'much'", r"task.toml: environment.memory_mb is 'much'"),
        ("environment", "cpus = ", r"task.toml is not TOML: .*line"),
        ("environment", "gpus = 2", r"task.toml: .*2 GPU"),
        ("environment", "os = 'windows'", r"(?i)windows"),
        ("environment", "env = {KEY = '${TUNER_IS_NOT_SET}'}", r"task.toml: .*TUNER_IS_NOT_SET"),
        ("verifier", "environment_mode = 'separate'", r"task.toml: verifier: .*not supported"),
        ("agent", "timeout_sec = 'soon'", r"task.toml: agent.timeout_sec is 'soon'"),
    ],
)
def test_a_wrong_task_is_refused_by_file_field_and_value(section, lines, said, task_of):
    folder = task_of(**{section: lines})
    with pytest.raises(ConfigError, match=said) as raised:
        Harbor(folder)
    assert str(folder) in str(raised.value)


def test_wrong_arguments_are_refused(task_of, tmp_path):
    folder = task_of()
    for given, said in (
        ({"network": "some"}, "network is 'some'"),
        ({"sandbox": "jail"}, "sandbox is 'jail': expected 'local', .*daytona.*e2b.*modal"),
        ({"limits": {"memory": 1}}, "limits has no 'memory'; there are cpus, memory_mb"),
        ({"agent": 3}, "agent is 3 .*: expected .*terminus-2"),
        ({"agent_options": {"turn": 3}}, "agent_options: .*turn"),
    ):
        with pytest.raises(ConfigError, match=said):
            Harbor(folder, **given)
    (folder / "tests/test.sh").unlink()
    with pytest.raises(ConfigError, match=r"tests/test.sh"):
        Harbor(folder)
    with pytest.raises(ConfigError, match=r"neither it nor a folder in it has a task.toml"):
        Harbor(tmp_path)


def test_it_is_named_by_a_text():
    text = f"harbor:{TASKS}"
    assert not brought(text).named
    assert from_settings(text, "tuner.environment").named
    rows = from_settings({"kind": "harbor", "folder": str(TASKS)}, "x").train_dataset
    assert [row["task"] for row in rows] == NAMES
    with pytest.raises(ConfigError, match="'harbor:' and its first argument"):
        brought("harbor:")


async def test_an_image_that_cannot_be_had_or_built_is_named(task_of, harbor):
    for missing in (
        harbor(task_of(environment="docker_image = 'localhost/no-such:1'"), agent=idle),
        harbor(broken(task_of(name="other")), agent=idle),
    ):
        with pytest.raises((SandboxError, ImportError), match=r"no-such|Dockerfile"):
            await rewarded(missing)


def broken(folder):
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text.replace("docker_image", "# docker_image"))
    (folder / "environment/Dockerfile").write_text(f"FROM {IMAGE}\nRUN false\n")
    return folder


async def test_an_agent_of_harbors_uses_the_session(task_of, harbor):
    keys = [{"keystrokes": "echo hello > greeting.txt\n", "duration": 0.3}]
    work = {"analysis": "", "plan": "", "commands": keys, "task_complete": False}
    done = {**work, "commands": [], "task_complete": True}
    answers = [json.dumps(work), json.dumps(done), json.dumps(done)]
    options = {"record_terminal_session": False}
    environment = harbor(task_of(), agent="terminus-2", agent_options=options)
    async with gateway_of(StubEngine(answers, max_model_len=100_000)) as gateway:
        session = gateway.open_session("rollout")
        _, judged = await rewarded(environment, model=PlainChatModel(session))
        calls = session.seal()
    assert (judged.reward, len(calls)) == (1, 3)


@pytest.fixture
def compose(tmp_path, monkeypatch):
    """Harbor's own podman works: with podman-compose, and limits that need no rights."""
    limits = ", ".join(f'"{word.partition("=")[2]}"' for word in given_limits())
    (tmp_path / "containers.conf").write_text(f"[containers]\ndefault_ulimits = [{limits}]\n")
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


async def test_harbors_own_sandboxes_stand_behind_the_same_interface(compose, tmp_path, harbor):
    folder = tmp_path / "broken_script"
    shutil.copytree(TASKS / "broken_script", folder)
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text.replace("no-network", "public"))

    async def agent(task, terminal, model):
        await terminal.write("/app/fix.sh", SCRIPTS["broken_script"][1])
        done = await terminal.run("bash fix.sh; echo fixed")
        return done.stdout + (await terminal.read("total.py")).partition("sum(")[2]

    environment = harbor(folder, agent=agent, sandbox="harbor-podman", network="task", ahead=0)
    output, judged = await rewarded(environment)
    said = output.response.said.replace("\r", "")  # it has a terminal
    assert said.startswith("fixed\nint(line) for line")
    assert judged.reward == 1
