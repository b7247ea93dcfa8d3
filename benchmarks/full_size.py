"""Seconds and memory of a step with a model of full size on a CPU, beside the prediction.

The shape is that of Qwen3-0.6B. Weights are random and in bfloat16, masters and the optimizer's
state in float32. The vocabulary has 151,936 tokens, of which the tokenizer (of the repository's
tiny model) knows the first few hundred: answers are of the length that they may have at most, and
little of them can be read. Two agents take two turns each, with a history of their own; the
reference is there, as it is by default. It is a whole run of `tune()`, its checkpoint included, in
a process of its own: memory is the most that it had resident (`ru_maxrss`), without what it had
after a run of the tiny model, which imports all there is. Predicted is what a run counts with
(`tuner.runs.placement`).

Of the steps the last one is shown, since the first one makes the optimizer's state. Seconds inside
of an update are those of the calls that do the part, by a clock around them.

    python benchmarks/full_size.py [--steps 2] [--tokens 32]
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _report import Row, report
from train_step import SHAPES
from transformers import Qwen3ForCausalLM

from tuner import TuneResult, WorkflowOutput, tune
from tuner.config import load_config
from tuner.runs.placement import Machine, needs_of
from tuner.training.forward.layouts import Forward
from tuner.training.optimizer import MasterAdamW
from tuner.training.trainer import PolicyTrainer

TINY = Path(__file__).parents[1] / "models" / "tiny_math"
SHAPE = SHAPES["cuda"][0]
CONTEXT, MICRO_BATCH = 1024, 512
TASKS, GROUP, TURNS = 2, 4, 2
ALLOWED_GIB, ALLOWED_ERROR = 16, 0.15
GIB = 2**30
PARTS = ("generation", "reference", "forward", "backward", "optimizer", "publishing")


def make_model(folder: Path) -> Qwen3ForCausalLM:
    """The model, which is written with a tokenizer that knows less than its vocabulary."""
    torch.set_default_dtype(torch.bfloat16)
    model: Qwen3ForCausalLM = SHAPE.model("cpu")
    torch.set_default_dtype(torch.float32)
    ends = json.loads((TINY / "generation_config.json").read_text())
    model.generation_config.update(**ends)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    return model


def settings(folder: Path, model: Path, steps: int, tokens: int) -> list[str]:
    return [
        f"model.model_path={model}",
        f"model.max_model_len={CONTEXT}",
        f"model.max_response_tokens={tokens}",
        f"checkpoint_root_dir={folder / 'checkpoints' / model.name}",
        f"buffer.batch_size={TASKS}",
        f"buffer.total_steps={steps}",
        f"algorithm.repeat_times={GROUP}",
        "algorithm.optimizer.lr=1e-6",
        f"explorer.runner_per_model={TASKS * GROUP}",
        f"trainer.max_token_len_per_gpu={MICRO_BATCH}",
        "tuner.dtype=bfloat16",
        "tuner.device=cpu",
    ]


REWARDS = itertools.cycle((0.0, 1.0))


async def two_agents(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """A writer and a critic, each with a history of its own."""
    histories: dict[str, list[dict[str, str]]] = {
        "writer": [{"role": "system", "content": "Work the problem out."}],
        "critic": [{"role": "system", "content": "Say what is wrong with the answer."}],
    }
    said = task["question"]
    for _ in range(TURNS):
        for role, messages in histories.items():
            agent = model.role(role)
            messages.append({"role": "user", "content": said})
            answer = await agent.client.chat.completions.create(
                model=agent.model_name, messages=messages
            )
            said = f"{task['question']} {answer.choices[0].message.content}"
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return WorkflowOutput(reward=next(REWARDS))


class Clock:
    """Seconds in some methods, by the part of a step that they are."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def watch(self, owner: type, name: str, part: Callable[[], str]) -> None:
        """Count what a method takes."""
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            of, started = part(), time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[of] += time.perf_counter() - started

        setattr(owner, name, timed)

    def watch_updates(self) -> None:
        """All parts of an update, and where one ends."""
        self.watch(
            Forward, "logprobs", lambda: "forward" if torch.is_grad_enabled() else "reference"
        )
        self.watch(torch.Tensor, "backward", lambda: "backward")
        for name in ("clip_grad_norm", "step_if_finite"):
            self.watch(MasterAdamW, name, lambda: "optimizer")
        update = PolicyTrainer.step_lr_scheduler

        def ended(trainer: PolicyTrainer) -> None:
            update(trainer)
            self.steps.append(dict(self.seconds))
            self.seconds.clear()

        PolicyTrainer.step_lr_scheduler = ended  # type: ignore[method-assign, assignment]


def resident() -> int:
    """Bytes that this process has resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def run(folder: Path, model: Path, steps: int, tokens: int) -> TuneResult:
    tasks = [{"question": f"Tom has {number} pens. How many pens?"} for number in range(TASKS)]
    overrides = settings(folder, model, steps, tokens)
    return tune(two_agents, train_dataset=tasks * steps, overrides=overrides)


def train(folder: Path, steps: int, tokens: int) -> dict[str, Any]:
    """A whole run in this process: the metrics of its last step, seconds by part, and memory."""
    run(folder, TINY, 1, tokens)
    before, clock = resident(), Clock()
    clock.watch_updates()
    metrics = run(folder, folder / "model", steps, tokens).history[-1]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "metrics": metrics,
        "parts": {
            "generation": metrics["time/idle"],
            "publishing": metrics["time/sync"],
            **clock.steps[-1],
        },
        "bytes": most - before,
        "all": most,
    }


def rows_of(found: dict[str, Any], predicted: int) -> list[Row]:
    metrics, parts = found["metrics"], found["parts"]
    whole = parts["generation"] + metrics["time/training"] + parts["publishing"]
    case = f"{SHAPE.name}, {TASKS} x {GROUP} rollouts of two agents"
    error = abs(predicted - found["bytes"]) / found["bytes"]
    return [
        Row(case, "GiB at the peak", found["bytes"] / GIB, "predicted", predicted / GIB),
        Row(case, "error of the prediction", error, "allowed", ALLOWED_ERROR, 1.0, False),
        Row(case, "GiB of the process", found["all"] / GIB, "allowed", ALLOWED_GIB, 1.0, False),
        Row(case, "s/step", whole),
        *(Row(case, f"s of {part}", parts[part], "of", whole) for part in PARTS),
        Row(case, "sampled tokens", metrics["tokens/sampled"]),
        Row(case, "unique tokens of an update", metrics["tokens/unique"]),
        Row(case, "unique tokens/s of an update", metrics["train/unique_tokens_per_second"]),
        Row(
            case,
            "mean difference of recorded and recomputed log-probs",
            metrics["train/logprob_mismatch_mean"],
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        print(json.dumps(train(given.train, given.steps, given.tokens)))
        return
    free = Machine.here(torch.device("cpu")).memory
    if free < ALLOWED_GIB * GIB:
        print(f"left out: {ALLOWED_GIB} GiB of memory are wanted, and {free / GIB:.1f} are free")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        config = load_config(
            overrides=settings(folder, folder / "model", given.steps, given.tokens)
        )
        needs = needs_of(config, model, CONTEXT, references=1, critics=0)
        del model
        done = subprocess.run(
            [sys.executable, *sys.argv, "--train", name],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    report(
        "full_size",
        rows_of(found, needs.trainer + needs.update),
        ["torch", "transformers", "openai"],
    )


if __name__ == "__main__":
    main()
