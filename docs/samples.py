"""Rewrites the outputs of commands that pages show: `python -m docs.samples`.

They are the code blocks that begin with `$ tuner`. The commands run one after the other in a folder
with a finished run of the gsm8k example and two evaluations.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"```text\n\$ (tuner [^\n]+)\n(.*?)```", re.DOTALL)

AGENT = """\
from tuner import JudgeOutput, WorkflowOutput
from tuner.rewards import final_answer, math_equal


async def answer(task, model):
    reply = await model.client.chat.completions.create(
        model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
    )
    return WorkflowOutput(response=reply.choices[0].message.content or "")


def is_right(task, response):
    return float(math_equal(final_answer(response), final_answer(task["answer"])))


async def right(task, response):
    return JudgeOutput(reward=is_right(task, response))


async def partial_credit(task, response):
    some = 0.25 * any(one.isdigit() for one in response)
    return JudgeOutput(reward=max(some, is_right(task, response)))


async def brief(task, response):
    return JudgeOutput(reward=is_right(task, response) - 0.02 * len(response))
"""
CONFIG = f"""\
project: AgentScope
name: GSM8K-tiny
model: {{model_path: {ROOT}/models/tiny_math, max_model_len: 512, max_response_tokens: 96}}
algorithm: {{optimizer: {{lr: 1.0e-3}}}}
buffer:
  batch_size: 8
  total_steps: 5
  explorer_input:
    taskset: {{path: {ROOT}/examples/gsm8k/data, split: train}}
    eval_tasksets: [{{name: test, path: test.jsonl}}]
tuner: {{workflow: "agent.py:answer", judge: "agent.py:brief"}}
"""


def prepare(folder: Path) -> None:
    """Writes the agent and its configuration, and runs and evaluates them."""
    (folder / "agent.py").write_text(AGENT, encoding="utf-8")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    rows = (ROOT / "examples/gsm8k/data/test.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "test.jsonl").write_text("\n".join(rows[:60]), encoding="utf-8")
    run("tuner run config.yaml tuner.judge=agent.py:right", folder)
    run("tuner eval config.yaml tuner.judge=agent.py:right --output tried", folder)


def run(command: str, folder: Path) -> str:
    """The output of a command without the folder's path; some samples exit with status 1.

    Raises:
        RuntimeError: It printed nothing.
    """
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    if not done.stdout:
        raise RuntimeError(f"{command}: {done.stderr}")
    return done.stdout.replace(f"{folder.resolve()}/", "").replace(f"{ROOT}/", "")


def samples(page: Path) -> Iterator[tuple[str, str]]:
    """The commands of a page and the outputs that it shows."""
    yield from BLOCK.findall(page.read_text(encoding="utf-8"))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            for command, old in samples(page):
                new = run(command, Path(name)).strip("\n")
                text = text.replace(f"$ {command}\n{old}```", f"$ {command}\n{new}\n```")
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
