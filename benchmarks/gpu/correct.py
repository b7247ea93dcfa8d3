"""Slice 1: what is computed on the GPU is what the model's own forward pass computes there."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from benchmarks._report import Row
from benchmarks.gpu.check import ROOT, Skipped, last_lines, require
from benchmarks.train_step import Case, make_batch
from tests.engines.models import (
    VOCABULARY,
    change_weights,
    crowd,
    error,
    generate_all,
    make_engine,
    make_model,
    prompt,
    until,
)
from tests.models.matrix import LAYOUTS, alone, rows_of
from tests.training.configured import training
from tests.training.exact import KINDS, all_float64, computed, model_of
from tuner.engines import SamplingParams
from tuner.training.forward.layouts import Forward, exact_forward
from tuner.training.trainer import PolicyTrainer

EXACT = 1e-4
"""Of log-probs in nats, and of the difference of gradients beside the gradient, in float32."""
BFLOAT16 = {"log-probs": 0.1, "gradient": 0.05}
"""The same, between two ways to compute in bfloat16."""
WORSE = 1.5
"""How much larger the error of a layout in bfloat16 may be than that of one row per call."""


def layouts(device: str, precision: str, width: int, compiled: bool = False) -> Iterator[Row]:
    """Log-probs and gradients in the three layouts, of trees of one tile and of several, beside the
    model's own forward pass over one row at a time; of that in float64 on the CPU too."""
    if compiled and device == "cpu":
        raise Skipped("kernels for a CPU take minutes to make")
    dtype = getattr(torch, precision)
    found: dict[tuple[str, str, str], list[tuple[float, str, float]]] = {}
    # Two of the kinds have all kinds of layers. Eager attention, gemma2's, is of no width. Kernels
    # of wide heads in float32 take longest to make.
    for kind in KINDS if width == 8 else ("qwen3", "gemma3")[: 128 // width]:
        changed = {"head_dim": width}
        if kind.startswith("gemma"):
            changed["query_pre_attn_scalar"] = width
        model = model_of(kind, **changed).to(device, dtype)
        for longest in (48, 150 if device == "cpu" else 400):
            rows, where = rows_of(longest), f"{kind}, {longest} tokens"
            wanted = alone(model, rows)
            if dtype == torch.bfloat16:
                exact = all_float64(model_of(kind, **changed).bfloat16())
                truth = alone(exact, rows)
                usual = errors(wanted, truth, mean=True)
            forwards: dict[str, Forward] = {}
            for layout in LAYOUTS:
                forward = exact_forward(model, None, layout=layout, compiled=compiled)
                assert (forward.layout, forward.compiled) == (layout, compiled), (where, layout)
                forwards[layout] = replace(forward, runs="never")
                if forward.runs != "never":
                    forwards[f"{layout}, flash attention"] = replace(forward, runs="always")
            for layout, forward in forwards.items():
                for max_tokens in (longest + 20,) if device == "cpu" else (10_000, longest + 20):
                    with warnings.catch_warnings():
                        # FlexAttention without its kernel has all scores in memory.
                        warnings.filterwarnings("error", message="flex_attention called without")
                        got = computed(model, rows, forward, max_tokens)
                    for of, value in errors(got, wanted).items():
                        allowed = EXACT if dtype == torch.float32 else BFLOAT16[of]
                        key = (layout, f"{of}, largest difference", "allowed")
                        found.setdefault(key, []).append((value, where, allowed))
                    if dtype == torch.bfloat16:
                        for of, value in errors(got, truth, mean=True).items():
                            key = (layout, f"{of}, error", "one row per call in bfloat16")
                            found.setdefault(key, []).append((value, where, usual[of]))
    for (layout, metric, peer), values in found.items():
        case, target = f"{layout}, {precision}, heads of {width}{', compiled' * compiled}", 1.0
        ours, where, peer_value = max(values, key=lambda value: value[0] / value[2])
        if peer != "allowed":  # a single one of these is a matter of chance
            where, target = "mean of all", round(1 / WORSE, 3)
            ours = statistics.fmean(value for value, _, _ in values)
            peer_value = statistics.fmean(value for _, _, value in values)
        yield Row(case, f"{metric} ({where})", ours, peer, peer_value, target, more_is_better=False)


def errors(found: Any, wanted: Any, *, mean: bool = False) -> dict[str, float]:
    """Of log-probs the largest or mean difference, and of gradients that beside the gradient."""
    of_logp, of_gradient = (
        a.cpu().double() - b.cpu().double() for a, b in zip(found, wanted, strict=True)
    )
    return {
        "log-probs": float(of_logp.abs().mean() if mean else of_logp.abs().max()),
        "gradient": float(of_gradient.norm() / wanted[1].norm()),
    }


def engine(device: str) -> Iterator[Row]:
    """Requests of several settings at once, on prompts that share prefixes, before and after
    the weights change; and some that are cancelled."""
    for kind in ("qwen3", "mistral", "gemma3"):
        model = make_model(kind).to(device)
        worst = asyncio.run(_worst_of_engine(model))
        metric = "log-probs, largest difference from a fresh pass"
        yield Row(f"engine, {kind}", metric, worst, "allowed", EXACT, 1.0, more_is_better=False)


async def _worst_of_engine(model: Any) -> float:
    served = make_engine(model, max_slots=4)
    assert served.batched
    worst = 0.0
    for version in range(2):
        for _ in range(2):
            requests = list(crowd())
            for (ids, sampling), got in zip(
                requests, await generate_all(served, requests), strict=True
            ):
                worst = max(worst, error(model, ids, got, sampling))
                assert set(got.versions) == {version}
        assert served.stats.prompt_tokens_reused > 0
        async with served.pause():
            change_weights(model)
            await served.update_weights(version + 1)
    endless = SamplingParams(max_tokens=240)
    before = served.stats.sampled_tokens
    tasks = [
        asyncio.ensure_future(served.generate(prompt(5, n), endless, "session")) for n in range(6)
    ]
    await until(lambda: served.stats.sampled_tokens > before + 8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: served.stats.running == served.stats.waiting == 0)
    await served.close()
    return worst


def _trainer(device: str, dtype: torch.dtype = torch.float32, **settings: Any) -> PolicyTrainer:
    model = make_model().to(device, dtype)
    numbers = training(
        total_steps=9, lr=1e-5, kl="none", max_tokens_per_micro_batch=120, **settings
    )
    return PolicyTrainer(model, numbers)


def _update(trainer: PolicyTrainer) -> None:
    batch = make_batch(Case("", 2, 4, 3, 20, 10, 8), VOCABULARY)
    trainer.ppo_update(trainer.compute_advantages(batch))


def waits(device: str) -> Iterator[Row]:
    """From the first micro-batch to the optimizer's step Python waits for the GPU once."""
    if device == "cpu":
        raise Skipped("a CPU is not waited for")
    trainer = _trainer(device)
    _update(trainer)
    start, end = trainer.optimizer.zero_grad, trainer.optimizer.step_if_finite

    def starts() -> None:
        start()
        torch.cuda.set_sync_debug_mode("warn")

    def ends(*args: Any, **settings: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        end(*args, **settings)

    with (
        warnings.catch_warnings(record=True) as seen,
        mock.patch.object(trainer.optimizer, "zero_grad", starts),
        mock.patch.object(trainer.optimizer, "step_if_finite", ends),
    ):
        warnings.simplefilter("always")
        _update(trainer)
    count = sum("synchronizing CUDA operation" in str(warning.message) for warning in seen)
    yield Row("one update", "waits", count, "allowed", 1, 1.0, more_is_better=False)


def resume(device: str) -> Iterator[Row]:
    """A trainer that was saved and loaded has the same state bit for bit, and its next update is
    that of one that went on."""
    _deterministic()
    for dtype in (torch.float32, torch.bfloat16):
        straight = _trainer(device, dtype)
        for _ in range(2):
            _update(straight)
        with tempfile.TemporaryDirectory() as folder:
            straight.save(Path(folder) / "state.pt")
            loaded = PolicyTrainer(copy.deepcopy(straight.model), straight.config)
            loaded.load(Path(folder) / "state.pt")
        saved, got = (tree_leaves(each.optimizer.state_dict()) for each in (straight, loaded))
        for one, other in zip(saved, got, strict=True):
            assert not isinstance(one, torch.Tensor) or torch.equal(one.cpu(), other.cpu())
        yield _same(f"resume, {dtype}", straight, loaded)


def offload(device: str) -> Iterator[Row]:
    """The optimizer's state in main memory gives the same weights."""
    _deterministic()
    for dtype in (torch.float32, torch.bfloat16):
        kept, away = (_trainer(device, dtype, optimizer_offload=there) for there in (False, True))
        for trainer in (kept, away):
            for _ in range(2):
                _update(trainer)
        yield _same(f"optimizer in main memory, {dtype}", kept, away)


def _deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def _same(case: str, one: PolicyTrainer, other: PolicyTrainer) -> Row:
    """Largest difference of the weights in float32 after an update of each."""
    for trainer in (one, other):
        _update(trainer)
    pairs = zip(one.optimizer.masters, other.optimizer.masters, strict=True)
    most = max(float((a.cpu() - b.cpu()).abs().max()) for a, b in pairs)
    metric = "weights, largest difference after an update"
    return Row(case, metric, most, "allowed", 1e-6, 1.0, more_is_better=False)


def lora(device: str) -> Iterator[Row]:
    """The gradient of an adapter in the three layouts beside one row per call."""
    from tests.training.lora import wrapped

    model = wrapped(make_model().to(device))
    rows = rows_of(200)
    wanted = alone(model, rows)
    for layout in LAYOUTS:
        forward = exact_forward(model, None, layout=layout)
        assert forward.layout == layout
        found = computed(model, rows, forward, 10_000)
        for of, value in errors(found, wanted).items():
            yield Row(f"LoRA, {layout}", of, value, "allowed", EXACT, 1.0, more_is_better=False)


def run(device: str) -> Iterator[Row]:
    """Training on the demo's problems, one call each, without an agent framework."""
    from benchmarks import agent_step  # needs more packages than the rest

    steps, prompts = (2, 2) if device == "cpu" else (8, 16)
    history = agent_step.history(
        agent_step.one_turn_case(prompts),
        steps,
        f"tuner.device={device}",
        "tuner.dtype=float32",
        "algorithm.optimizer.lr=5e-4",
    )
    yield from _run_rows("one turn", history)


def demo(device: str) -> Iterator[Row]:
    """`make demo`, for a few steps."""
    require("agentscope")
    few = ["buffer.total_steps=2", "buffer.batch_size=2", "explorer.eval_on_startup=false"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "examples/gsm8k/main.py",
            f"checkpoint_root_dir={folder}",
            f"tuner.device={device}",
            "tuner.dtype=float32",
            *(few if device == "cpu" else ["buffer.total_steps=8"]),
        ]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, last_lines(ended.stderr or ended.stdout)
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        history = [json.loads(line) for line in metrics.read_text().splitlines()]
    yield from _run_rows("the demo", [row for row in history if "train/loss" in row])


def _run_rows(case: str, history: list[dict[str, float]]) -> Iterator[Row]:
    mismatch = max(row["train/logprob_mismatch_mean"] for row in history)
    metric = "mean difference of recorded and recomputed log-probs"
    yield Row(case, metric, mismatch, "allowed", EXACT, 1.0, more_is_better=False)
    reward = [row["reward/mean"] for row in (history[-1], history[0])]
    yield Row(case, f"mean reward, step {len(history)}", reward[0], "first step", reward[1])
