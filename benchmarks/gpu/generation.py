"""Slices 3 and 4: how fast answers are sampled and steps of an agent done, and what other programs
must be there for. Goals are not bounds."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from benchmarks import engine
from benchmarks._report import Row
from benchmarks.engine import (
    NEW_TOKENS,
    Case,
    Prompts,
    Run,
    measure,
    with_engine,
    with_generate,
    with_vllm,
)
from benchmarks.gpu.check import ROOT, last_lines, require
from benchmarks.gpu.trainer import TOY, repeats
from benchmarks.train_step import SHAPES
from tuner import WorkflowOutput

TURNS = 6


def _model(device: str) -> PreTrainedModel:
    """That of 0.6B, which ends no answer by chance."""
    model = (TOY if device == "cpu" else SHAPES["cuda"][0]).model(device)
    model.generation_config.eos_token_id = None
    return model


def distinct(device: str, count: int) -> Iterator[Row]:
    """Prompts of 100 tokens."""
    yield from _beside(device, "distinct prompts", count, engine.distinct)


def shared(device: str, count: int) -> Iterator[Row]:
    """One prompt of 800 tokens for all."""
    make = partial(engine.shared, tokens=800, group=_few(device, count))
    yield from _beside(device, "800 tokens are shared", count, make)


def _few(device: str, count: int) -> int:
    return max(1, count // 8) if device == "cpu" else count


def beside_vllm(device: str) -> Iterator[Row]:
    """Both kinds of prompts, beside vLLM with weights of its own."""
    require("vllm")
    with tempfile.TemporaryDirectory() as folder:
        model = _model(device)
        peers = {"vLLM": with_vllm(model, Path(folder))}
        for case, make in (("distinct prompts", engine.distinct), ("8 groups", engine.shared)):
            yield from _rows(model, f"{case}, 64 requests", 64, make, peers)


def _beside(device: str, case: str, count: int, make: Callable[[int], Prompts]) -> Iterator[Row]:
    model, count = _model(device), _few(device, count)
    yield from _rows(
        model, f"{case}, {count} at once", count, make, {"model.generate": with_generate(model)}
    )


def _rows(
    model: PreTrainedModel,
    case: str,
    count: int,
    make: Callable[[int], Prompts],
    peers: dict[str, Run],
) -> Iterator[Row]:
    rounds = repeats(model.device.type)
    timed = Case(case, lambda: make(count))
    speeds = measure({"ours": with_engine(model), **peers}, timed, rounds)
    case = f"{case}, {NEW_TOKENS} new tokens"
    for peer in peers:
        yield Row(case, "tokens/s", speeds["ours"], peer, speeds[peer])
        mine, theirs = (1000 * count / speeds[name] for name in ("ours", peer))
        yield Row(case, "ms for a token of each", mine, peer, theirs, more_is_better=False)


async def _talk(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """An agent whose tool has the same answer for whatever it is asked."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(TURNS + 1):
        completion = await model.client.chat.completions.create(
            model=model.model_name, messages=messages
        )
        said = completion.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "It is higher. Try another number."},
        ]
    return WorkflowOutput(response=said)


def agent(device: str) -> Iterator[Row]:
    """Steps of an agent by part: layers of the 0.6B shape in bfloat16, random, and the small
    vocabulary of the repository's model, whose words an agent can say."""
    from benchmarks import agent_step  # needs more packages than the rest

    prompts, steps = (2, 2) if device == "cpu" else (8, 3)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny_math")
    with tempfile.TemporaryDirectory() as folder:
        shape = TOY if device == "cpu" else SHAPES["cuda"][0]
        replace(shape, vocabulary=len(tokenizer)).model(device).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        case = agent_step.Case(
            name="",
            model=Path(folder),
            prompts=prompts,
            max_tokens=48,
            calls=TURNS + 1,
            tasks=lambda count: [{"id": i, "question": f"Number {i}?"} for i in range(count)],
            prompt=agent_step.problem,
            workflow=_talk,
            score=lambda text, task: float(len(text) % 7),
        )
        history = agent_step.history(
            case,
            steps,
            f"tuner.device={device}",
            f"tuner.dtype={'bfloat16' if device == 'cuda' else 'float32'}",
            f"model.max_model_len={2048 if device == 'cuda' else 1024}",
        )
    name = f"tool agent, {TURNS} tool turns, {prompts} x {agent_step.GROUP}"
    last = history[-1]
    for part in sorted(key for key in last if key.startswith("time/")):
        yield Row(name, f"s in {part.removeprefix('time/')}", last[part], "step", last["time/step"])
    yield Row(name, "sampled tokens/s", last["tokens/sampled"] / last["time/step"])
    yield Row(name, "log-probs, mean mismatch", last["train/logprob_mismatch_mean"])


def suite(device: str, package: str, tests: str) -> Iterator[Row]:
    """The tests that need `package`."""
    require(package)
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not nightly", tests]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, last_lines(ended.stdout)
    yield Row(tests, "exit status", ended.returncode)
