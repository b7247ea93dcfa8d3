"""Seconds from the command `tuner run` to the first token, and the imports' share.

The clock begins before the process does and ends when the agent reads the first token of its first
answer. Files are in the page cache, as they are from the second start on: the first of the repeats
does not count. What each package's modules take is Python's own account (`-X importtime`), of a
start of its own, since accounting takes time itself.

    python benchmarks/startup.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

from _report import Row, report

GOAL = 4.0
SHOWN = 10
"""Packages with a row of their own, those that take longest."""
AGENT = """
import sys
import time

from tuner import WorkflowOutput

async def workflow(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    stream = await model.client.chat.completions.create(
        model=model.model_name, messages=messages, stream=True
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print("first token at", time.time(), file=sys.stderr, flush=True)
    return WorkflowOutput(reward=0.0)
"""
CONFIG = """
checkpoint_root_dir: {folder}/checkpoints
name: startup
buffer:
  batch_size: 1
  total_steps: 1
  explorer_input: {{taskset: {{path: {folder}/tasks.jsonl}}}}
algorithm: {{repeat_times: 2}}
model: {{max_response_tokens: 8}}
tuner: {{workflow: "{folder}/agent.py:workflow"}}
"""
_TOKEN = re.compile(r"first token at ([\d.]+)")
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s*([\w.]+)")


def started(folder: Path, *options: str) -> tuple[float, list[str]]:
    """Seconds until the first token, and the lines that the process wrote until then.

    Args:
        folder: Of a run that has not begun.
        options: Of the interpreter.
    """
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text('{"question": "Tom has 4 pens. How many pens?"}\n')
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    command = [sys.executable, *options, "-m", "tuner", "run", str(folder / "config.yaml")]
    # Compiled modules are kept, as they are unless somebody says otherwise.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began, lines = time.time(), list[str]()
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if (found := _TOKEN.search(line)) is not None:
                process.kill()
                return float(found[1]) - began, lines
            lines.append(line)
    raise RuntimeError(f"tuner run ended with {process.returncode} without a token: {lines[-20:]}")


def imports(lines: list[str]) -> Counter[str]:
    """Seconds that the modules of each package took, without those that they import themselves."""
    found: Counter[str] = Counter()
    for line in lines:
        if (module := _IMPORT.match(line)) is not None:
            found[module[2].partition(".")[0]] += int(module[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats: int = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started(folder / "cold")
        seconds = [started(folder / str(number))[0] for number in range(repeats)]
        _, lines = started(folder / "counted", "-X", "importtime")
    took = imports(lines)
    rows = [
        Row(
            "tuner run to the first token",
            "seconds",
            median(seconds),
            "goal",
            GOAL,
            target=1.0,
            more_is_better=False,
        ),
        Row("its imports, counted", "seconds", sum(took.values()) / 1e6, more_is_better=False),
    ]
    rows += [
        Row(f"... {package}", "seconds", micros / 1e6, more_is_better=False)
        for package, micros in took.most_common(SHOWN)
    ]
    report("startup", rows, packages=["torch", "transformers", "openai", "agentscope"])


if __name__ == "__main__":
    main()
