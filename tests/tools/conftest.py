"""Runs that the commands look at, and the command line."""

import sys

import pytest

from tests.kit import runs
from tuner import cli
from tuner.loop import run_local


@pytest.fixture(scope="session")
def trained(random_model_path, tmp_path_factory):
    """Runs of two steps, `whole` on all weights and `adapter` on an adapter."""
    root = tmp_path_factory.mktemp("runs")
    for name, overrides in (
        ("whole", ()),
        ("adapter", ("model.lora_configs=[{lora_rank: 2}]", "algorithm.optimizer.lr=0.1")),
    ):
        run_local(
            runs.config(
                random_model_path,
                root,
                "tuner.deterministic=false",
                "buffer.total_steps=2",
                *overrides,
                name=name,
            ),
            workflow=runs.workflow,
            judge=runs.judge,
            train_tasks=runs.TRAIN,
            eval_tasks={"held-out": runs.EVAL},
        )
    return root / "p"


@pytest.fixture
def said(capsys, monkeypatch):
    """Exit status, output and errors of `tuner <arguments>`."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tuner", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run
