"""What the command line says of itself, and of what it cannot read."""

import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import tuner
from tuner import cli

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
    for name in ("init", "run", "check", "view", "replay", "--version", "--install-completion"):
        assert name in output


@pytest.mark.parametrize(
    "command",
    [
        "init",
        "run",
        "train",
        "check",
        "eval",
        "compare",
        "doctor",
        "export",
        "view",
        "replay",
        "rebase",
        "rerun",
    ],
)
def test_help_has_an_example(command, capsys, monkeypatch):
    status, output, _ = said(capsys, monkeypatch, command, "--help")
    assert not status
    assert f"Example: tuner {command} " in output


def test_version(capsys, monkeypatch):
    assert tuner.__version__ == PROJECT["version"]
    status, output, _ = said(capsys, monkeypatch, "--version")
    assert not status
    assert output == f"agentscope-tuner {tuner.__version__}\n"


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
