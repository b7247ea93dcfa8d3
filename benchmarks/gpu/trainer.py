"""Slice 2: how fast an update is, what it takes, and where its time goes. Goals are not bounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import train_step
from benchmarks._report import Row
from benchmarks.gpu.check import require
from benchmarks.train_step import CASES, SHAPES, Case, Shape, Work, costs, make_batch, ours
from tests.training import flash
from tuner.traces import TokenTree
from tuner.training.forward.tree_pass import TreeAttention
from tuner.training.forward.varlen import RunsChoice

GOALS = {
    ("Qwen3-0.6B", 2): 92e3,
    ("Qwen3-0.6B", 16): 43e3,
    ("Qwen3-1.7B", 2): 36e3,
    ("Qwen3-1.7B", 16): 25e3,
}
"""Unique tokens/s by model and thousands of tokens: MFU of 40% where they are one row."""
MFU = 0.4
TOY = Shape("toy", 397, 64, 128, 2, 4, 2, 16)
PARTS = {
    "attention": ("flex", "flash", "fmha", "attention", "triton_tem"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "aten::mm", "aten::bmm", "aten::addmm"),
    "optimizer": ("multi_tensor", "adam", "foreach"),
    # Their names list what was fused, casts ("_to_copy") too.
    "compiled elementwise": ("triton_poi", "triton_red", "triton_per"),
    "copies": ("memcpy", "memset", "copy"),
}


def case_of(thousands: int, device: str) -> Case:
    """Rollouts whose tree has about so many thousand tokens, on a CPU a sixteenth of them: 8
    rollouts of 6 turns, or 4 groups of 8 of 8 or 10."""
    groups, turns = {2: (1, 6), 16: (4, 8), 64: (4, 10)}[thousands]
    tokens = thousands * 1024 // (16 if device == "cpu" else 1)
    system = tokens // 32
    turn = (tokens - system) // (groups * 8 * turns)
    name = f"{thousands}k tokens, {groups * 8} rollouts x {turns} turns"
    return Case(name, groups, 8, turns, system, turn - turn // 2, turn // 2)


def repeats(device: str) -> int:
    return 1 if device == "cpu" else 3


def _shape(number: int, device: str) -> Shape:
    return TOY if device == "cpu" else SHAPES["cuda"][number]


def _settings(number: int) -> dict[str, Any]:
    """What fits into 78 GiB without activation checkpointing, with as few cuts as that allows."""
    return {"max_tokens_per_micro_batch": 16_500 if number else 20_000}


def update(device: str, number: int, thousands: int) -> Iterator[Row]:
    """Seconds, tokens, MFU and memory of an update on the token tree, beside padded rows."""
    shape, case = _shape(number, device), case_of(thousands, device)
    batch, settings = make_batch(case, shape.vocabulary), _settings(number)
    layouts = ("tree",) if thousands > 16 else ("tree", "padded")
    found = costs(
        {name: partial(ours, batch, name, shape, device, **settings) for name in layouts},
        repeats(device),
        device,
    )
    tree = found["tree"]
    row = partial(Row, f"{shape.name}: {case.name}")
    if "padded" in found:
        padded = found["padded"].seconds
        yield row("s/update", tree.seconds, "padded rows", padded, more_is_better=False)
    else:
        yield row("s/update", tree.seconds)
    unique = TokenTree.build(batch.rows).unique_tokens
    goal = GOALS.get((shape.name, thousands))
    yield row("unique tokens/s", unique / tree.seconds, "goal" if goal else "", goal)
    yield row("row tokens/s", sum(map(len, batch.rows)) / tree.seconds)
    if "mfu" in tree.metrics:
        yield row("MFU", tree.metrics["mfu"], "goal", MFU)
    if "peak_memory_gib" in tree.metrics:
        predicted = _predicted(shape, unique, settings["max_tokens_per_micro_batch"]) / 2**30
        yield row("peak GiB", tree.metrics["peak_memory_gib"], "predicted", predicted)


def _predicted(shape: Shape, unique: int, most: int) -> int:
    """Bytes at the peak of an update of so many distinct tokens, so many in a micro-batch."""
    from tuner.config import load_config
    from tuner.runs.placement import needs_of, peak_of

    config = load_config(overrides=["tuner.activation_checkpointing=false", "tuner.compile=true"])
    model = shape.model("meta").bfloat16()
    needs = needs_of(config, model, 4096, references=0, critics=0)
    return peak_of(config, model, needs, min(unique, most), alone=unique <= most)


def parts(device: str, number: int, thousands: int) -> Iterator[Row]:
    """Milliseconds of the device in each kind of kernel."""
    shape, case = _shape(number, device), case_of(thousands, device)
    batch = make_batch(case, shape.vocabulary)
    work = ours(batch, "tree", shape, device, **_settings(number))
    work()  # makes the kernels and the optimizer's state
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        if event.device_type != (DeviceType.CUDA if on_gpu else DeviceType.CPU):
            continue
        time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        spent[_part(event.key)] += time / 1000
    for part, milliseconds in sorted(spent.items(), key=lambda item: -item[1]):
        whole = sum(spent.values())
        yield Row(f"{shape.name}: {case.name}", f"ms in {part}", milliseconds, "of", whole)


def _part(kernel: str) -> str:
    name = kernel.lower()
    for part, words in PARTS.items():
        if any(word in name for word in words):
            return part
    return "elementwise and others"


def attention(device: str) -> Iterator[Row]:
    """One layer's attention over trees, forward and backward, in two calls of flash attention
    beside FlexAttention, and which of both the estimate takes."""
    if device == "cpu":
        flash.register()
    choices: tuple[RunsChoice, ...] = ("always", "never", "cheaper")
    for thousands in (2, 16, 64):
        case = case_of(thousands, device)
        rows = make_batch(case, 1000).rows
        one = f"{case.name}, one rollout"
        for case_name, some in ((case.name, rows), (one, rows[: case.turns])):
            tree = TokenTree.build(some)
            ours, flex, chosen = (
                TreeAttention(tree, None, torch.device(device), runs) for runs in choices
            )
            query, key, value = (
                torch.randn(1, heads, tree.unique_tokens, 128, device=device).bfloat16()
                for heads in (16, 8, 8)
            )
            ways = {"flash": ours, "flex": flex}
            makers: dict[str, Any] = {
                name: partial(_attending, way, query, key, value) for name, way in ways.items()
            }
            found = costs(makers, repeats(device), device)
            takes = "flash attention" if chosen.run_mask is not None else "FlexAttention"
            for metric, of in ((f"s of a layer (estimate: {takes})", "seconds"), ("bytes", "peak")):
                mine, peers = (getattr(found[way], of) for way in ways)
                yield Row(case_name, metric, mine, "FlexAttention", peers, more_is_better=False)


def _attending(attention: TreeAttention, query: Tensor, key: Tensor, value: Tensor) -> Work:
    def work() -> dict[str, float]:
        q, k, v = (each.detach().requires_grad_() for each in (query, key, value))
        attention.attend(q, k, v, 128**-0.5).sum().backward()
        return {}

    return work


def beside_trl(device: str) -> Iterator[Row]:
    """One turn, where TRL trains the same rows."""
    require("trl")
    shape, case = _shape(0, device), CASES[2]
    batch = make_batch(case, shape.vocabulary)
    makers: dict[str, Any] = {
        "tree": partial(ours, batch, "tree", shape, device),
        "trl": partial(train_step.trl, batch, case, shape, device),
    }
    found = costs(makers, repeats(device), device)
    for metric, of in (("s/update", "seconds"), ("peak bytes of an update", "peak")):
        mine, peers = (getattr(found[name], of) for name in makers)
        case_name = f"{shape.name}: {case.name}"
        yield Row(case_name, metric, mine, "TRL GRPOTrainer", peers, more_is_better=False)
