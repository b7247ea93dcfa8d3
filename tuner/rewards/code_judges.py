"""Judges that run the program in a response, within limits: on inputs, or under pytest.

Whatever the program does within its limits is its result: a program that never ends fails its
tests. What prevents the attempt (no sandbox, missing tests) is an error, never a reward of 0.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from tuner.encoding import DISPLAY_ERRORS
from tuner.errors import MissingDependencyError, RewardError, SandboxError, pip_install
from tuner.rewards.sandbox import Limits, ProgramResult, remove, run
from tuner.tasks.functions import JudgeOutput, JudgeType, TaskRow, response_text, shown

Isolation = Literal["auto", "bubblewrap", "process"]
EACH_INPUT, ALL_TESTS = Limits(), Limits(seconds=30.0)
SHOWN = 300
"""Characters of an output or a failure in the feedback."""
SHOWN_FAILURES = 5
REPORT_BYTES = 1_000_000
_BLOCK = re.compile(r"^```[ \t]*([\w+-]*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")


def code_in(text: str, languages: Sequence[str] = _PYTHON) -> str:
    """The program in a text: its last code block in one of the languages, or the whole text.
    Reasoning before `</think>` is ignored."""
    said = text.rpartition("</think>")[2]
    blocks = [code for language, code in _BLOCK.findall(said) if language.lower() in languages]
    return blocks[-1] if blocks else said


def code_judge(
    *,
    field: str = "tests",
    partial: bool = True,
    command: Sequence[str] = (sys.executable, "-I", "program.py"),
    limits: Limits = EACH_INPUT,
    isolation: Isolation = "auto",
) -> JudgeType:
    """A judge that runs the program in the response on inputs and compares its outputs.

    The field holds `[{"input": "2 3", "output": "5"}, ...]`, or that as JSON text. An output is
    right if it is equal except for spaces at the ends of lines and at its end, and the program
    exits with 0. The comparison is outside of the sandbox, where the program cannot reach it.

    Args:
        field: Field of the task with inputs and outputs.
        partial: The reward is the share of inputs with the right output; otherwise 1 for all, or 0.
        command: Runs the program, which is `program.py` in the working directory.
        limits: For each input.
        isolation: As for `tuner.rewards.sandbox.run`.

    The judge raises RewardError if the task has no tests, and SandboxError if nothing can run.
    """

    async def judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
        tests = _inputs(task, field)
        seen: list[str | None] = []
        for given, wanted in tests:
            async with _folder({"program.py": code_in(response_text(response))}) as folder:
                finished = await run(
                    command, folder=folder, stdin=given, limits=limits, isolation=isolation
                )
            seen.append(_wrong(finished, given, wanted, limits))
        return _verdict([one for one in seen if one is not None], len(tests), partial, of="inputs")

    return judge


def pytest_judge(
    *,
    field: str = "tests",
    module: str = "solution",
    partial: bool = True,
    limits: Limits = ALL_TESTS,
    isolation: Isolation = "auto",
) -> JudgeType:
    """A judge that runs a task's unit tests on the program in the response, by pytest.

    The program is `solution.py`, and the tests import it. The feedback is pytest's report: which
    tests failed, and why. pytest and its tests run in the program's own process, so a program that
    sets out to deceive them can; `code_judge` compares outside.

    Args:
        field: Field of the task with the text of a test file.
        module: The name by which the tests import the program.
        partial: The reward is the share of tests that passed; otherwise 1 for all, or 0.
        limits: For all tests together.
        isolation: As for `tuner.rewards.sandbox.run`.

    Raises:
        MissingDependencyError: pytest is not installed (extra `rewards`).
        ValueError: `module` is not a valid module name.

    The judge raises RewardError if the task has no tests, and SandboxError if nothing can run.
    """
    if find_spec("pytest") is None:
        raise MissingDependencyError(
            f"pytest runs unit tests and is not installed: {pip_install('rewards')}"
        )
    if not module.isidentifier() or module == "test_of_it":
        raise ValueError(f"module is {module!r}: it must be a valid module name")

    runs = False

    async def judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
        nonlocal runs
        files = {f"{module}.py": code_in(response_text(response)), _TESTS: _tests(task, field)}
        runs = runs or await _pytest_runs(limits, isolation)
        finished, report = await _run_pytest(files, limits, isolation)
        if report is None or finished.ended != "exited":
            why = _ending(finished, limits)
            said = f"pytest did not finish: {why}.\n{_short(finished.stdout + finished.stderr)}"
            return JudgeOutput(reward=0.0, metrics={"tests_passed": 0.0}, feedback=said.strip())
        return _verdict(report.failures, report.total, partial, of="tests")

    return judge


async def _pytest_runs(limits: Limits, isolation: Isolation) -> bool:
    """Whether pytest itself works in the sandbox; raises SandboxError if not, since its verdict on
    a program would then mean nothing."""
    files = {_TESTS: "def test_it():\n    pass\n"}
    finished, _ = await _run_pytest(files, limits, isolation)
    if finished.ended != "exited" or finished.status != 0:
        said = _short((finished.stdout + finished.stderr).strip())
        raise SandboxError(f"pytest does not run here: {_ending(finished, limits)}. {said}")
    return True


_TESTS, _REPORT = "test_of_it.py", "report.xml"
_PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "--tb=short", "--color=no", "-p", "no:cacheprovider"),
    *("--rootdir=.", "--import-mode=prepend", f"--junitxml={_REPORT}", _TESTS),
)


@dataclass(frozen=True)
class _PytestReport:
    """pytest's result: the number of tests, and the reason of each that did not pass."""

    total: int
    failures: list[str]


async def _run_pytest(
    files: Mapping[str, str], limits: Limits, isolation: Isolation
) -> tuple[ProgramResult, _PytestReport | None]:
    async with _folder(files) as folder:
        finished = await run(
            _PYTEST,
            folder=folder,
            environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            limits=limits,
            isolation=isolation,
        )
        return finished, _report(_read(folder / _REPORT))


def _report(text: bytes | None) -> _PytestReport | None:
    """Parse a report; None if it is invalid. The program may have written it."""
    if text is None or b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        return None
    try:
        cases = list(ElementTree.fromstring(text).iter("testcase"))
    except ElementTree.ParseError:
        return None
    failures = []
    for case in cases:
        for kind in ("failure", "error", "skipped"):
            if (found := case.find(kind)) is not None:
                name = case.get("name") or "collection"
                said = (found.text or found.get("message") or "").strip()
                failures.append(f"{name}: {'skipped' if kind == 'skipped' else _last(said)}")
                break
    return _PytestReport(len(cases), failures) if cases else None


def _verdict(failures: Sequence[str], total: int, partial: bool, *, of: str) -> JudgeOutput:
    passed = total - len(failures)
    share = passed / total
    more = len(failures) - SHOWN_FAILURES
    lines = [f"{passed} of {total} {of} passed.", *failures[:SHOWN_FAILURES]]
    return JudgeOutput(
        reward=share if partial else float(passed == total),
        metrics={f"{of}_passed": share},
        feedback="\n".join([*lines, *([f"... and {more} more"] if more > 0 else [])]),
    )


def _wrong(finished: ProgramResult, given: str, wanted: str, limits: Limits) -> str | None:
    """The error in a program's result; None if it is right."""
    if finished.ended != "exited" or finished.status != 0:
        errors = _short(_last(finished.stderr.strip()))
        return f"Input {_short(given)!r}: {_ending(finished, limits)}. {errors}".strip()
    if _lines(finished.stdout) == _lines(wanted):
        return None
    return f"Input {_short(given)!r}: it wrote {_short(finished.stdout)!r}, not {_short(wanted)!r}."


def _ending(finished: ProgramResult, limits: Limits) -> str:
    if finished.ended == "exited":
        return f"the program exited with {finished.status}"
    most = {
        "timeout": f"{limits.seconds:g} s",
        "memory": f"{limits.memory_mb} MiB of memory",
        "output": f"{limits.output_bytes} bytes of output",
        "disk": f"{limits.disk_mb} MiB on the disk",
        "processes": f"{limits.processes} processes",
    }
    return f"the program was ended at its limit of {most[finished.ended]}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _last(text: str) -> str:
    """The end of a traceback, which names the error."""
    return text if len(text) <= SHOWN else f"...{text[-SHOWN:]}"


def _inputs(task: Mapping[str, Any], field: str) -> list[tuple[str, str]]:
    found = TaskRow(task)[field]
    try:
        rows = json.loads(found) if isinstance(found, str) else found
        tests = [(row["input"], row["output"]) for row in rows]
        if not tests or not all(isinstance(text, str) for one in tests for text in one):
            raise TypeError("inputs and outputs must be texts, at least one of each")
    except (ValueError, TypeError, LookupError) as error:
        raise RewardError(
            f'the task\'s {field!r} is {shown(found)}: it must be [{{"input": text, "output": '
            f"text}}, ...] ({error})"
        ) from error
    return tests


def _tests(task: Mapping[str, Any], field: str) -> str:
    found = TaskRow(task)[field]
    try:
        ast.parse(found)
    except (SyntaxError, ValueError, TypeError) as error:
        raise RewardError(
            f"the task's {field!r} is {shown(found)}: it must be the text of a test file ({error})"
        ) from error
    return str(found)


@asynccontextmanager
async def _folder(files: Mapping[str, str]) -> AsyncIterator[Path]:
    """A temporary folder with these files."""
    folder = Path(tempfile.mkdtemp(prefix="tuner-code-"))
    try:
        for name, text in files.items():
            (folder / name).write_bytes(text.encode(errors=DISPLAY_ERRORS))
        yield folder
    finally:
        await asyncio.shield(asyncio.to_thread(remove, folder))


def _read(path: Path) -> bytes | None:
    """A file that a program left; None if the program made it something else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(REPORT_BYTES + 1)
    return text if len(text) <= REPORT_BYTES else None
