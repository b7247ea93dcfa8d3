"""The agent whose end decides is trained, with branches for a part of the tokens."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "branching"
SMALL = ("buffer.total_steps=1", "buffer.batch_size=2", "explorer.eval_interval=0")


@pytest.fixture(scope="module")
def trained(main, tmp_path_factory):
    root = tmp_path_factory.mktemp("branching")
    return {
        name: main.main([*options, *SMALL, f"checkpoint_root_dir={root / name}"])
        for name, options in (("flat", ()), ("branches", ("--branches",)))
    }


def test_branches_take_the_notes_once(trained):
    flat, branches = (trained[name].history[-1] for name in ("flat", "branches"))
    assert flat["tokens/sampled"] > 2 * branches["tokens/sampled"]
    assert branches["branches/rollouts"] == 2 * 14
    assert branches["branches/diverged"] == 0
    assert branches["tokens/replayed"] > branches["tokens/sampled"]


def test_the_notes_are_not_what_is_rewarded(main):
    import agent

    tasks = agent.tasks("test", asked=2)
    assert all(len(task["notes"]) == agent.NOTES for task in tasks)
    assert all(len(task["problems"]) == 2 for task in tasks)
    assert agent.before_the_answers([None] * agent.NOTES) == 1.0
    assert agent.before_the_answers([None] * (agent.NOTES - 1)) == 0.0
