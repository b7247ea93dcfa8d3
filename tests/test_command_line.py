"""What the command line says of itself, and of what it cannot read."""

import errno
import os
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

import tuner
from tests.kit.examples import grid
from tuner import cli
from tuner.errors import TunerError, system_faults

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def said(capsys, monkeypatch, *arguments):
    """Exit status, output and errors of `tuner <arguments>`."""
    monkeypatch.setattr(sys, "argv", ["tuner", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output = capsys.readouterr()
    return ended.value.code, output.out, output.err


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("runn x", "No such command 'runn'. Did you mean 'run', 'rerun'? (see: tuner --help)"),
        ("run", "Missing argument 'CONFIG'. (see: tuner run --help)"),
        ("view", "Missing argument 'RUN'. (see: tuner view --help)"),
        ("replay somewhere", "Missing option '--judge'. (see: tuner replay --help)"),
        ("--wrong", "No such option: --wrong"),
        ("view x --port abc", "Invalid value for '--port': "),
    ],
)
def test_what_cannot_be_read_is_one_sentence(arguments, wanted, capsys, monkeypatch):
    status, output, errors = said(capsys, monkeypatch, *arguments.split())
    assert (status, output) == (2, "")
    assert errors.startswith(wanted)
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "gone", "instead"),
    [
        ("plan config.yaml --gpus 8xH100", "plan", "`tuner check`"),
        ("check config.yaml --branching", "check --branching", "tuner.branching.where to best"),
        ("compare r --candidate c --effect 0.1", "compare --candidate", "compare --proof"),
        ("compare a b --proof --steps=1-3", "compare --steps", "compare --proof"),
        ("compare a b --least-effective 5", "compare --least-effective", "compare --proof"),
    ],
)
def test_a_removed_command_or_option_names_its_replacement(
    arguments, gone, instead, capsys, monkeypatch
):
    status, output, errors = said(capsys, monkeypatch, *arguments.split())
    assert (status, output) == (2, "")
    assert errors.startswith(f"tuner {gone} was removed: ")
    assert instead in errors
    assert errors.count("\n") == 1


def test_alone_it_says_what_there_is(capsys, monkeypatch):
    status, output, _ = said(capsys, monkeypatch)
    assert status == 2
    assert "<bool>" not in output
    for name in ("init", "run", "check", "view", "replay", "--version", "--install-completion"):
        assert name in output


@pytest.mark.parametrize("command", get_command(cli.app).commands)
def test_help_has_an_example(command, capsys, monkeypatch):
    status, output, _ = said(capsys, monkeypatch, command, "--help")
    assert not status
    assert f"Example: tuner {command} " in output
    assert "<bool>" not in output


def test_a_whole_traceback_of_an_error_is_shown_on_request(capsys, monkeypatch, tmp_path):
    _, _, errors = said(capsys, monkeypatch, "run", str(tmp_path / "none.yaml"))
    assert errors.count("\n") == 1
    monkeypatch.setenv("TUNER_DEBUG", "1")
    status, _, whole = said(capsys, monkeypatch, "run", str(tmp_path / "none.yaml"))
    assert status == 2
    assert whole.startswith("Traceback")
    assert whole.endswith(errors)


def test_version(capsys, monkeypatch):
    assert tuner.__version__ == PROJECT["version"]
    status, output, _ = said(capsys, monkeypatch, "--version")
    assert not status
    assert output == f"agentscope-tuner {tuner.__version__}\n"


CONFIG = str(Path(__file__).parents[1] / "config.yaml")
WITH_A_PATH = [
    "run {}",
    f"run {CONFIG} checkpoint_root_dir={{}}",
    f"run {CONFIG} model.model_path={{}}",
    f"run {CONFIG} buffer.explorer_input.taskset.path={{}}",
    f"check {CONFIG} tuner.judge={{}}.py:judge",
    f"eval {CONFIG} --limit 1 --output {{}}",
    f"eval {CONFIG} --limit 1 --candidate {{}}",
    "export {} FOLDER",
    f"export {Path(CONFIG).parent / 'models/tiny_math'} {{}}",
    "compare {} {}",
    "view {} --report",
    "replay {} --judge tests.kit.agents:judge",
    "rerun {} train-1-0-0",
    f"train {{}} --config {CONFIG}",
    "rebase {} --judge x.py:f",
    "init {}",
    f"serve {CONFIG} checkpoint_root_dir={{}}",
]


@pytest.mark.parametrize("fault", ["file/a/b", "loop", "loop/a", "x" * 300])
@grid("command", WITH_A_PATH, quick=6)
def test_a_path_that_cannot_be_used_is_named(command, fault, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    arguments = command.format(*[tmp_path / fault] * 2).replace("FOLDER", str(tmp_path / "new"))
    status, _, errors = said(capsys, monkeypatch, *arguments.split())
    assert status == 2
    assert "Traceback" not in errors
    assert fault.partition("/")[0] in errors


@pytest.mark.parametrize("command", [f"run {CONFIG}", "check config.yaml", "view run"])
def test_a_working_directory_that_is_gone_is_one_sentence(command, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    status, _, errors = said(capsys, monkeypatch, *command.split())
    assert (status, errors.count("\n")) == (2, 1)
    assert "the working directory does not exist any more" in errors


REFUSED = (
    "EACCES EPERM EROFS EIO ENOSPC EDQUOT EFBIG ENOTDIR EISDIR ELOOP ENAMETOOLONG EMFILE ENOMEM"
)


@pytest.mark.parametrize("name", REFUSED.split())
def test_what_the_system_refuses_names_the_path_and_what_to_do(name):
    number = getattr(errno, name)
    refused = OSError(number, os.strerror(number), "/data/x")
    with pytest.raises(TunerError, match=rf"^/data/x: {os.strerror(number)}; \w+"), system_faults():
        raise refused


def test_a_full_disk_is_named_where_the_system_does_not(tmp_path):
    message = rf"^a file, most likely in {tmp_path}: No space left on device; make room there"
    with pytest.raises(TunerError, match=message), system_faults(tmp_path):
        Path("/dev/full").write_text("x")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "", "of_ours"),
        ConnectionRefusedError(errno.ECONNREFUSED, ""),
        PermissionError(errno.EACCES, "bind"),
        RuntimeError("of ours"),
        ImportError("no module"),
        ValueError("of ours"),
    ],
)
def test_errors_of_another_kind_are_left_as_they_are(error):
    with pytest.raises(type(error)) as raised, system_faults():
        raise error
    assert raised.value is error


@pytest.mark.parametrize("error", [MemoryError(), ImportError("x.so: failed to map segment")])
def test_too_little_memory_is_one_sentence(error):
    with pytest.raises(TunerError, match=r"too little memory .*ulimit -v"), system_faults():
        raise error


def test_an_interrupted_command_says_what_is_kept_and_ends_like_ctrl_c(monkeypatch, capsys):
    def interrupted(**arguments):
        raise KeyboardInterrupt("interrupted after step 2\nto continue: tuner run c.yaml")

    monkeypatch.setattr(cli, "functions_of", lambda *_: cli.NamedFunctions(None, None, "local"))
    monkeypatch.setattr(import_module("tuner.tune"), "tune", interrupted)
    monkeypatch.setattr(sys, "argv", ["tuner", "run", "c.yaml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == cli.INTERRUPTED
    assert "to continue: tuner run c.yaml" in capsys.readouterr().err
