"""Seconds per training step beside TRL's GRPOTrainer: generation, reward, and one update.

Same tiny model, same prompts, group size, length limit, learning rate and loss (PPO clip, token
mean, no KL); a single-turn task, so both have the same work. Ours goes the way of a real run: one
OpenAI client per rollout, gateway, recorded traces on disk, metrics. TRL generates with
`model.generate` in one padded batch. The learning rate is small, so that lengths stay the same.

    python benchmarks/agent_step.py [--steps 12]
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _report import Row, report

from tuner import WorkflowOutput, tune

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "tiny_math"
SYSTEM = "You are a helpful math problem solving agent."
LEARNING_RATE = 1e-6
WARMUP = 2  # first steps, which load and allocate


def tasks(count: int) -> list[dict[str, Any]]:
    from datasets import load_dataset

    rows = load_dataset(str(ROOT / "examples" / "gsm8k" / "data"), split="train")
    return [dict(row) for row in rows.select(range(count))]


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def score(text: str, answer: str) -> float:
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and numbers[-1] == answer.split("####")[-1].strip())


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=messages(task["question"])
    )
    text = completion.choices[0].message.content or ""
    return WorkflowOutput(reward=score(text, task["answer"]))


def ours(prompts: int, group: int, max_tokens: int, steps: int) -> tuple[float, float]:
    """Median seconds per step, and mean tokens per completion."""
    with tempfile.TemporaryDirectory() as folder:
        result = tune(
            workflow,
            None,
            tasks(prompts * steps),
            overrides=[
                f"model.model_path={MODEL}",
                f"checkpoint_root_dir={folder}",
                f"model.max_response_tokens={max_tokens}",
                f"buffer.batch_size={prompts}",
                f"buffer.total_steps={steps}",
                f"algorithm.repeat_times={group}",
                f"algorithm.optimizer.lr={LEARNING_RATE}",
                "algorithm.kl_loss_fn=none",
                f"explorer.runner_per_model={prompts * group}",
                f"tuner.max_slots={prompts * group}",
                f"tuner.signal_patience={steps}",
            ],
        )
    rows = result.history[WARMUP:]
    return (
        statistics.median(row["time/step"] for row in rows),
        statistics.fmean(row["calls/completion_tokens"] for row in rows),
    )


def trl(prompts: int, group: int, max_tokens: int, steps: int) -> tuple[float, float]:
    """The same from TRL."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [score(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]

    data = Dataset.from_list(
        [
            {"prompt": messages(task["question"]), "answer": task["answer"]}
            for task in tasks(prompts * steps)
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=prompts * group,
            num_generations=group,
            max_completion_length=max_tokens,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
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
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL),
            processing_class=AutoTokenizer.from_pretrained(MODEL, padding_side="left"),
            reward_funcs=reward,
            args=arguments,
            train_dataset=data,
            callbacks=[Clock()],
        )
        trainer.train()
    lengths = [
        row["completions/mean_length"]
        for row in trainer.state.log_history
        if "completions/mean_length" in row
    ]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return statistics.median(seconds[WARMUP - 1 :]), statistics.fmean(lengths[WARMUP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    rows = []
    for prompts, group, max_tokens in ((4, 8, 128), (16, 8, 128), (32, 8, 128)):
        case = f"{prompts} prompts x {group}, up to {max_tokens} tokens"
        peer_seconds, peer_length = trl(prompts, group, max_tokens, steps)
        seconds, length = ours(prompts, group, max_tokens, steps)
        rows.append(
            Row(
                case,
                "s/step",
                seconds,
                "TRL GRPOTrainer",
                peer_seconds,
                target=round(1 / 1.5, 3),
                more_is_better=False,
            )
        )
        rows.append(Row(case, "tokens/completion", length, "TRL GRPOTrainer", peer_length))
    report("agent_step", rows, ["torch", "transformers", "trl", "openai"])


if __name__ == "__main__":
    main()
