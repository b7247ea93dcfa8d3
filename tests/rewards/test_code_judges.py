"""Programs in responses are run within limits, on inputs and under a real pytest."""

import asyncio
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.kit.examples import grid
from tuner.errors import MissingDependencyError, RewardError, SandboxError
from tuner.rewards import Limits, code_in, code_judge, code_judges, pytest_judge, weighted
from tuner.tasks.functions import MissingFieldError, call_judge

ISOLATIONS = ("auto", "process")
FEW = Limits(seconds=5.0, memory_mb=512)
SHORT = Limits(seconds=1.0, memory_mb=512)
SUMS = [{"input": "2 3\n", "output": "5"}, {"input": "20 30\n", "output": "50\n"}]
ADDS = "```python\nprint(sum(map(int, input().split())))\n```"
TESTS = """
from solution import add
import pytest

def test_of_small_numbers():
    assert add(2, 3) == 5

@pytest.mark.parametrize("a", [10, 20])
def test_of_others(a):
    assert add(a, a) == 2 * a
"""


async def judged(judge, response, **task):
    return await call_judge(judge, task=task, response=response, auxiliary_models={}, logger=None)


def left_behind():
    """Folders of ours, and processes below us."""
    folders = set(Path(tempfile.gettempdir()).glob("tuner-*"))
    return folders, {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = left_behind()
    yield
    deadline = time.monotonic() + 20
    while not all(now <= then for now, then in zip(left_behind(), before, strict=True)):
        assert time.monotonic() < deadline, (left_behind(), before)


def test_the_program_is_the_last_block_of_its_language():
    text = "<think>```python\nno\n```</think>First:\n```sh\nls\n```\n"
    text += "```python\na = 1\n```\n```text\nout\n```"
    assert code_in(text) == "a = 1\n"
    assert code_in(text, ["sh"]) == "ls\n"
    assert code_in("a = 1") == "a = 1"
    assert code_in("```\nb = 2\n```") == "b = 2\n"


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_program_is_right_that_writes_what_is_wanted(isolation):
    judge = code_judge(isolation=isolation, limits=FEW)
    right = await judged(judge, ADDS, tests=SUMS)
    assert (right.reward, right.metrics) == (1.0, {"inputs_passed": 1.0})
    assert right.feedback == "2 of 2 inputs passed."
    part = await judged(judge, "input(); print(5)", tests=SUMS)
    assert part.reward == 0.5
    assert part.feedback == (
        "1 of 2 inputs passed.\nInput '20 30\\n': it wrote '5\\n', not '50\\n'."
    )
    whole = code_judge(partial=False, isolation=isolation, limits=FEW)
    assert (await judged(whole, "input(); print(5)", tests=SUMS)).reward == 0.0


async def test_tests_may_be_json_text_and_programs_of_any_language():
    judge = code_judge(field="cases", command=("sh", "program.py"), limits=FEW)
    cases = '[{"input": "a", "output": "a"}]'
    assert (await judged(judge, "cat", cases=cases)).reward == 1.0


@grid("isolation", ISOLATIONS, quick=1)
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "exited with 3"),
        ("1 / 0", "ZeroDivisionError"),
        ("while True: pass", "ended at its limit of 1 s"),
        ("print('x' * 10**7)", "ended at its limit of 1000000 bytes of output"),
        ("x = bytearray(10**10)", "memory"),
    ],
)
async def test_what_a_program_does_wrong_is_told_and_earns_nothing(program, said, isolation):
    judge = code_judge(isolation=isolation, limits=Limits(seconds=1.0, memory_mb=256))
    found = await judged(judge, program, tests=SUMS[:1])
    assert found.reward == 0.0
    assert said.lower() in found.feedback.lower()


@pytest.mark.parametrize(
    "tests", [None, [], [{"input": "a"}], [{"input": 2, "output": 3}], "nonsense"]
)
async def test_tests_that_are_none_are_an_error_and_no_reward(tests):
    with pytest.raises(RewardError, match="the task's 'tests' is"):
        await judged(code_judge(), ADDS, tests=tests)


@grid("isolation", ISOLATIONS, quick=1)
async def test_unit_tests_are_run_by_pytest_and_its_report_is_the_feedback(isolation):
    judge = pytest_judge(isolation=isolation)
    right = await judged(judge, "```python\ndef add(a, b):\n    return a + b\n```", tests=TESTS)
    assert (right.reward, right.feedback) == (1.0, "3 of 3 tests passed.")
    wrong = "def add(a, b):\n    return a + b if a < 20 else 0"
    part = await judged(judge, wrong, tests=TESTS)
    assert part.reward == pytest.approx(2 / 3)
    assert part.metrics == {"tests_passed": pytest.approx(2 / 3)}
    first, second = part.feedback.split("\n", 1)
    assert first == "2 of 3 tests passed."
    assert second.startswith("test_of_others[20]: ")
    assert "assert 0 == (2 * 20)" in second
    assert (await judged(pytest_judge(partial=False), wrong, tests=TESTS)).reward == 0.0


@pytest.fixture(scope="module")
def judge_of_few():
    """It has tried once whether pytest runs."""
    return pytest_judge(limits=FEW)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def add(a, b:", "SyntaxError"),
        ("def plus(a, b): return a + b", "cannot import name 'add'"),
        ("import os; os._exit(0)", "pytest did not finish: the program exited with 0"),
        ("import sys; sys.exit(0)", "passed"),
        ("open('report.xml', 'w').write('<x'); import os; os._exit(0)", "did not finish"),
        ("import os; os.mkfifo('report.xml'); os._exit(0)", "did not finish"),
        ("import os; os.mkdir('report.xml'); os._exit(0)", "did not finish"),
        ("import os; os.symlink('/etc/passwd', 'report.xml'); os._exit(0)", "did not finish"),
        (
            "open('report.xml', 'w').write('<!DOCTYPE a [<!ENTITY b \"c\">]><testcase/>')\n"
            "import os; os._exit(0)",
            "did not finish",
        ),
    ],
)
async def test_a_program_that_keeps_tests_from_passing_earns_nothing(judge_of_few, program, said):
    found = await judged(judge_of_few, program, tests=TESTS)
    assert found.reward == 0.0
    assert said in found.feedback


async def test_a_program_that_does_not_end_earns_nothing():
    found = await judged(pytest_judge(limits=SHORT), "while True: pass", tests=TESTS)
    assert found.reward == 0.0
    assert "ended at its limit of 1 s" in found.feedback


async def test_a_skipped_test_is_not_passed():
    tests = "import pytest, solution\ndef test_a(): pytest.skip('not now')\ndef test_b(): pass"
    found = await judged(pytest_judge(), "", tests=tests)
    assert (found.reward, found.feedback) == (0.5, "1 of 2 tests passed.\ntest_a: skipped")


@pytest.mark.parametrize("tests", [None, 7, "def test(:"])
async def test_a_test_file_that_is_none_is_an_error_and_no_reward(tests):
    with pytest.raises(RewardError, match="must be the text of a test file"):
        await judged(pytest_judge(), "", tests=tests)
    with pytest.raises(MissingFieldError, match="no field 'tests'"):
        await judged(pytest_judge(), "")


async def test_a_program_gets_no_secret_of_ours(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    tests = [{"input": "", "output": "None"}]
    program = "import os; print(os.environ.get('JUDGE_API_KEY'))"
    assert (await judged(code_judge(), program, tests=tests)).reward == 1.0


async def test_a_cancelled_judge_leaves_nothing():
    judge = asyncio.ensure_future(
        judged(code_judge(limits=Limits(seconds=60)), "while True: pass", tests=SUMS)
    )
    while not left_behind()[1]:  # noqa: ASYNC110  # a process of somebody else's
        await asyncio.sleep(0.01)
    judge.cancel()
    with pytest.raises(asyncio.CancelledError):
        await judge


async def test_with_others_it_is_one_judge():
    def short(task, response):
        from tuner import JudgeOutput

        return JudgeOutput(reward=float(len(response) < 100))

    judge = weighted(
        {"tests": code_judge(limits=FEW), "short": short}, {"tests": 0.9, "short": 0.1}
    )
    found = await judged(judge, ADDS, tests=SUMS)
    assert found.reward == pytest.approx(1.0)
    assert found.metrics == {"tests": 1.0, "tests/inputs_passed": 1.0, "short": 1.0}


async def test_pytest_that_does_not_run_is_an_error_and_no_reward(monkeypatch):
    without_packages = [code_judges._PYTEST[0], "-S", *code_judges._PYTEST[1:]]
    monkeypatch.setattr(code_judges, "_PYTEST", without_packages)
    with pytest.raises(SandboxError, match=r"does not run here: .* No module named pytest"):
        await pytest_judge()(task={"tests": "def test_x(): pass"}, response="x = 1")


async def test_pytest_is_tried_with_the_settings_that_it_judges_with(monkeypatch):
    ran, run = [], code_judges.run

    async def noted(command, **options):
        ran.append((command, options["environment"]))
        return await run(command, **options)

    monkeypatch.setattr(code_judges, "run", noted)
    await judged(pytest_judge(limits=FEW), "x = 1", tests="def test_x(): pass")
    tried, judging = ran
    assert tried == judging


def test_pytest_that_is_not_there_is_named_with_its_extra(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tuner.rewards.code_judges.find_spec", lambda name: None)
        with pytest.raises(MissingDependencyError, match=r"pip install .*\[rewards\]"):
            pytest_judge()
    with pytest.raises(ValueError, match="must be a valid module name"):
        pytest_judge(module="a.b")
