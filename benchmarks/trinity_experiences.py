"""Tokens that Trinity-RFT trains for a tool agent: merged experiences beside one per call.

An agent makes six calls through the gateway, with a tool's words between them, in groups of four
rollouts; the repository's tiny model says what it likes. The calls become experiences as
`tuner.trinity.experiences` says: `merged`, or `calls`, which is how Trinity-RFT records an agent by
itself. Counted are the tokens of the rows that its trainer computes forward and backward; the
gradients of its policy loss (PPO's, `token-mean`, with `multi_step_grpo`'s advantages) are compared
in float64; the times of both are those of float32.
Neither Ray nor Trinity-RFT is needed; that its own functions give this gradient is tested in
tests/integration/trinity/test_gradients.py.

    python benchmarks/trinity_experiences.py [--tasks 4] [--turns 6] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _report import Row, report
from torch import Tensor

from tuner.engines.transformers.engine import TransformersEngine
from tuner.gateway import ChatRenderer, Gateway, SamplingDefaults
from tuner.rollouts import RolloutRunner, RolloutSettings
from tuner.rollouts.chat_models import chat_model
from tuner.runs.models import load_model, load_tokenizer
from tuner.tasks.functions import WorkflowOutput
from tuner.traces import Call, RolloutId, Trace
from tuner.training.advantages import call_normalized
from tuner.trinity.experience import TrainedSequence, merged, one_per_call

GROUP = 4
ANSWER = 24  # most tokens of an answer
CLIP = 0.2
ALLOWED = 1e-6  # relative distance of gradients that float32 advantages would explain
TARGET = 3.0
TINY = Path(__file__).parents[1] / "models" / "tiny_math"
SYSTEM = "You are a helpful math problem solving agent. A calculator answers each message."
# Turns are shown as they were written; the model's own template would take its reasoning out.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Make = Callable[[Sequence[Call]], list[TrainedSequence]]


def agent(turns: int) -> Callable[..., Any]:
    """A workflow of so many answers, with what a tool says to each but the last between them."""

    async def play(task: dict[str, Any], model: Any) -> WorkflowOutput:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {task['id'] + 3} plus {2 * task['id'] + 5}?"},
        ]
        said = 0
        for turn in range(turns):
            answer = await model.client.chat.completions.create(
                model=model.model_name, messages=messages
            )
            text = answer.choices[0].message.content or ""
            said += len(text)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "tool", "content": f"{turn}: {len(text)}", "tool_call_id": f"call{turn}"},
            ]
        return WorkflowOutput(reward=float(said % 7))

    return play


async def rollouts(tasks: int, turns: int) -> list[Trace]:
    """A group of rollouts for each task."""
    model = load_model(str(TINY), device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = load_tokenizer(str(TINY))
    engine = TransformersEngine(model, tokenizer, max_model_len=1024)
    renderer = ChatRenderer(tokenizer, chat_template=TEMPLATE, reasoning_parser="none")
    gateway = Gateway(engine, renderer, model_name="tiny")
    runner = RolloutRunner(
        gateway,
        agent(turns),
        None,
        make_model=lambda session: chat_model(session, kind="plain"),
        auxiliary_models=lambda rollout, seed: contextlib.nullcontext({}),
        settings=RolloutSettings(timeout=600, max_retries=0, seed=0),
    )
    try:
        found = await asyncio.gather(
            *(
                runner.run(
                    {"id": task}, RolloutId(1, task, rollout), SamplingDefaults(max_tokens=ANSWER)
                )
                for task in range(tasks)
                for rollout in range(GROUP)
            )
        )
    finally:
        await gateway.aclose()
        await engine.close()
    return [attempts[-1] for attempts in found]


def update(model: Any, traces: Sequence[Trace], make: Make) -> tuple[int, Tensor]:
    """(tokens computed, gradient) of one update of the policy on these rollouts."""
    rewards = torch.tensor([trace.reward for trace in traces], dtype=torch.float64)
    groups = torch.tensor([trace.id.task for trace in traces])
    advantages = call_normalized(rewards, torch.arange(len(rewards)), groups)
    rows = [
        (sequence, advantage)
        for trace, advantage in zip(traces, advantages.tolist(), strict=True)
        for sequence in make(trace.calls)
    ]
    trained = sum(sum(sequence.action_mask) for sequence, _ in rows)
    model.zero_grad()
    for sequence, advantage in rows:
        ids, start = torch.tensor(sequence.tokens), sequence.prompt_length
        logits = model(ids[None], use_cache=False).logits[0, start - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, ids[start:, None])[:, 0]
        ratio = (logp - torch.tensor(sequence.logprobs, dtype=logp.dtype)).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        (-gain[torch.tensor(sequence.action_mask)].sum() / trained).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return sum(len(sequence.tokens) for sequence, _ in rows), gradient


def seconds(model: Any, traces: Sequence[Trace], make: Make, repeats: int) -> float:
    """Median time of an update's forward and backward passes."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        update(model, traces, make)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    traces = asyncio.run(rollouts(asked.tasks, asked.turns))
    assert all(len(trace.calls) == asked.turns for trace in traces)
    model = load_model(str(TINY), device=torch.device("cpu"), dtype=torch.float32)
    exact = copy.deepcopy(model).double()
    ours, our_gradient = update(exact, traces, merged)
    theirs, their_gradient = update(exact, traces, one_per_call)
    distance = float((our_gradient - their_gradient).norm() / their_gradient.norm())
    case = f"{len(traces)} rollouts of {asked.turns} calls with a tool"
    peer = "one experience per call"
    times = [seconds(model, traces, make, asked.repeats) for make in (merged, one_per_call)]
    report(
        "trinity_experiences",
        [
            Row(case, "tokens of a step", ours, peer, theirs, TARGET, more_is_better=False),
            Row(case, "distance of gradients", distance, "allowed", ALLOWED, 1, False),
            Row(case, "forward and backward, s", times[0], peer, times[1], more_is_better=False),
        ],
        packages=("torch", "transformers"),
    )


if __name__ == "__main__":
    main()
