"""Seconds per training step of an agent (rollouts, judge, one update) beside TRL's GRPOTrainer.

Both train the same weights on the same tasks with the same group size, temperature, limit of tokens
per answer, learning rate and loss (PPO clip, token mean, no KL).

- Tool agent (`_guess_agent`): every rollout calls its tool a given number of times and then
  answers. TRL runs it with its own tool loop (`environment_factory`), which generates all rollouts
  turn by turn; here the agent is a workflow with an OpenAI client, and everything is recorded.
- One turn: word problems without tools.

The two take turns: some steps of TRL, some of ours, and so on, so that whatever else the machine
does meets both; a number is the median over all of them. What both have done is in the table beside
the seconds: sampled tokens and calls of the model in a rollout. The learning rate is small, so that
these stay the same. TRL generates with `model.generate`, its faster way on a CPU (continuous
batching takes several times as long, vLLM needs a GPU), without gradient checkpointing.

    python benchmarks/agent_step.py [--tries 1 3 6] [--rounds 3] [--steps 4]
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _guess_agent as agent
from _report import Row, report

from tuner import JudgeOutput, WorkflowOutput, tune

ROOT = Path(__file__).parents[1]
GROUP = 8
LEARNING_RATE = 1e-6
WARMUP = 1  # first steps of a round, which load and allocate
PEER = "TRL GRPOTrainer"
GOALS = {1: 3.0, 2: 5.0, 4: 5.0, 7: 4.5}
"""The ratio that is wanted, by calls of a rollout: one turn has no history to compute again."""


@dataclass(frozen=True)
class Case:
    """What both sides are given.

    Attributes:
        model: Folder of model and tokenizer.
        prompts: Groups in a step.
        max_tokens: Limit of one answer.
        calls: Answers in a rollout.
        tasks: As many of them as asked for.
        prompt: The first messages of a task.
        workflow: The agent here.
        environment: The agent's tools in TRL's form; None for one turn without tools.
        score: From the last answer's text and the task to a reward.
    """

    name: str
    model: Path
    prompts: int
    max_tokens: int
    calls: int
    tasks: Callable[[int], list[dict[str, Any]]]
    prompt: Callable[[dict[str, Any]], list[dict[str, str]]]
    workflow: Callable[..., Any]
    score: Callable[[str, dict[str, Any]], float]
    environment: Callable[[], Any] | None = None


@dataclass
class Measured:
    """Of every step: seconds, and sampled tokens and answers of a rollout in the mean."""

    seconds: list[float]
    tokens: list[float]
    calls: list[float]


def history(case: Case, steps: int, *overrides: str) -> list[dict[str, float]]:
    """The metrics of each step of a run."""

    async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
        return JudgeOutput(reward=case.score(response, task))

    with tempfile.TemporaryDirectory() as folder:
        return tune(
            case.workflow,
            judge,
            case.tasks(case.prompts * steps),
            overrides=[
                f"model.model_path={case.model}",
                f"checkpoint_root_dir={folder}",
                f"model.max_response_tokens={case.max_tokens}",
                f"buffer.batch_size={case.prompts}",
                f"buffer.total_steps={steps}",
                f"algorithm.repeat_times={GROUP}",
                f"algorithm.optimizer.lr={LEARNING_RATE}",
                "algorithm.kl_loss_fn=none",
                f"explorer.runner_per_model={case.prompts * GROUP}",
                f"tuner.max_slots={case.prompts * GROUP}",
                f"tuner.signal_patience={steps}",
                *overrides,
            ],
        ).history


def ours(case: Case, steps: int) -> Measured:
    rows = history(case, steps)[WARMUP:]
    rollouts = case.prompts * GROUP
    return Measured(
        [row["time/step"] for row in rows],
        [row["tokens/sampled"] / rollouts for row in rows],
        [row["calls/per_rollout"] for row in rows],
    )


def trl(case: Case, steps: int) -> Measured:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        tasks = [json.loads(task) for task in columns["task"]]
        return [
            case.score(messages[-1]["content"], task)
            for messages, task in zip(completions, tasks, strict=True)
        ]

    data = Dataset.from_list(
        [
            {**task, "task": json.dumps(task), "prompt": case.prompt(task)}
            for task in case.tasks(case.prompts * steps)
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=case.prompts * GROUP,
            num_generations=GROUP,
            # Of a whole rollout with TRL; that of one answer goes to `generate`.
            max_completion_length=4 * case.max_tokens * case.calls,
            generation_kwargs={"max_new_tokens": case.max_tokens},
            max_tool_calling_iterations=case.calls - 1 if case.environment else None,
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
            model=AutoModelForCausalLM.from_pretrained(case.model),
            processing_class=AutoTokenizer.from_pretrained(case.model, padding_side="left"),
            reward_funcs=reward,
            args=arguments,
            train_dataset=data,
            environment_factory=case.environment,
            callbacks=[Clock()],
        )
        trainer.train()
    logs = [row for row in trainer.state.log_history if "completions/mean_length" in row][WARMUP:]
    return Measured(
        [after - before for before, after in itertools.pairwise(ends)][WARMUP - 1 :],
        [row["completions/mean_length"] for row in logs],
        [1 + row.get("tools/call_frequency", 0.0) for row in logs],
    )


def in_turn(case: Case, rounds: int, steps: int) -> list[Row]:
    """The rows of one case, measured in `rounds` rounds of `steps` counted steps."""
    mine, peers = Measured([], [], []), Measured([], [], [])
    for _ in range(rounds):
        for total, run in ((peers, trl), (mine, ours)):
            part = run(case, steps + WARMUP)
            total.seconds += part.seconds
            total.tokens += part.tokens
            total.calls += part.calls
    seconds = statistics.median(mine.seconds), statistics.median(peers.seconds)
    return [
        Row(
            case.name,
            "s/step",
            seconds[0],
            PEER,
            seconds[1],
            target=GOALS[case.calls],
            more_is_better=False,
        ),
        Row(
            case.name,
            "sampled tokens/rollout",
            statistics.fmean(mine.tokens),
            PEER,
            statistics.fmean(peers.tokens),
        ),
        Row(
            case.name,
            "calls/rollout",
            statistics.fmean(mine.calls),
            PEER,
            statistics.fmean(peers.calls),
        ),
    ]


# The two kinds of agents


async def play(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The tool agent as anybody would write it with an OpenAI client."""
    game = agent.HiddenNumber()
    game.reset(**task)
    messages: list[Any] = list(agent.prompt(task))
    for _ in range(task["tries"] + 1):
        completion = await model.client.chat.completions.create(
            model=model.model_name, messages=messages, tools=[agent.TOOL]
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            try:
                found = game.try_number(**json.loads(call.function.arguments))
            except (TypeError, ValueError) as error:
                found = str({"error": str(error)})  # in TRL's words
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return WorkflowOutput(response=message.content or "")


def tool_case(model: Path, tries: int, prompts: int = 8) -> Case:
    return Case(
        name=f"tool agent, {tries} tool turn{'s' if tries > 1 else ''}, {prompts} x {GROUP}",
        model=model,
        prompts=prompts,
        max_tokens=96,
        calls=tries + 1,
        tasks=lambda count: agent.tasks(count, tries),
        prompt=agent.prompt,
        workflow=play,
        score=lambda text, task: agent.score(text, task["number"]),
        environment=agent.HiddenNumber,
    )


async def solve(task: dict[str, Any], model: Any) -> WorkflowOutput:
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=problem(task)
    )
    return WorkflowOutput(response=completion.choices[0].message.content or "")


def problem(task: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": agent.SYSTEM},
        {"role": "user", "content": task["question"]},
    ]


def is_right(text: str, task: dict[str, Any]) -> float:
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and numbers[-1] == task["answer"].split("####")[-1].strip())


def one_turn_case(prompts: int) -> Case:
    def tasks(count: int) -> list[dict[str, Any]]:
        from datasets import load_dataset

        rows = load_dataset(str(ROOT / "examples" / "gsm8k" / "data"), split="train")
        return [dict(row) for row in rows.select(range(count))]

    return Case(
        name=f"one turn, {prompts} x {GROUP}",
        model=agent.START,
        prompts=prompts,
        max_tokens=128,
        calls=1,
        tasks=tasks,
        prompt=problem,
        workflow=solve,
        score=is_right,
    )


def cases(folder: Path, tries: Sequence[int]) -> list[Case]:
    from trl.chat_template_utils import qwen3_chat_template

    # TRL parses tool calls of the templates that it knows.
    agent.teach(folder, qwen3_chat_template)
    return [
        *(tool_case(folder, count) for count in tries),
        *(one_turn_case(prompts) for prompts in (4, 16, 32)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, nargs="*", default=[1, 3, 6])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a round")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for case in cases(Path(folder), given.tries)
            for row in in_turn(case, given.rounds, given.steps)
        ]
    report("agent_step", rows, ["torch", "transformers", "trl", "openai"])


if __name__ == "__main__":
    main()
