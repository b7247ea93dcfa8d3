"""Seconds and memory of one update: token tree, packed and padded rows, and TRL's update.

An update is everything from a batch with rewards to new weights: advantages, log-probs, gradients,
clipping, AdamW; PPO clip, token mean, no KL. Tree, packed and padded rows are the same
`PolicyTrainer` with another `layout`, on the same rows in the same run. The floor is what any
training costs: the model's own forward pass with `labels`, and backward, over as many tokens as are
distinct, in rows of about the length of a rollout; no optimizer, no advantages. In such rows tokens
have less behind them than in a tree, which does not begin anew that often. So there is a second
such pass, in longer rows, with as many pairs of tokens that attend to each other as in the tree.
TRL (single turn, one row per completion) gets the same rows in the shape of its own generation's
output; its loss (`GRPOTrainer._compute_loss`), backward pass, clipping and AdamW are timed. The
median of the repeats counts, taken in turn. Peak memory is what an update holds at most beyond what
was there before it: weights and the optimizer's state.

On a CPU the model has Qwen3's shape with 0.8M parameters in float32; on a GPU the shapes of
Qwen3-0.6B and 1.7B in bfloat16 with float32 masters, and MFU.

    python benchmarks/train_step.py [--device cuda] [--repeats 3] [--no-trl]
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _report import Row as Result
from _report import report
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.training.configured import training
from tuner.engines.base import SamplingParams
from tuner.traces import RolloutId, TokenTree
from tuner.training.batch import Batch, Row
from tuner.training.trainer import PolicyTrainer

MAX_TOKENS = 16_384
Work = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; its weights are random."""

    name: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    wanted_mfu: float | None = None

    def model(self, device: str) -> Qwen3ForCausalLM:
        """The same weights every time."""
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
        with torch.device(device):
            model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
        if device == "cuda":
            model = model.bfloat16()
        model.eval()
        return model


SHAPES = {
    "cpu": (Shape("0.8M", 397, 128, 384, 4, 4, 2, 32),),
    "cuda": (
        Shape("Qwen3-0.6B", 151_936, 1024, 3072, 28, 16, 8, 128),
        Shape("Qwen3-1.7B", 151_936, 2048, 6144, 28, 16, 8, 128, wanted_mfu=0.4),
    ),
}


@dataclass(frozen=True)
class Case:
    """Rollouts of one or more tasks; each turn reads `read` tokens and samples `said`."""

    name: str
    groups: int
    group: int
    turns: int
    system: int
    read: int
    said: int
    target: float | None = None


CASES = (
    Case("8 rollouts x 20 turns", 1, 8, 20, 800, 60, 30, target=8.0),
    Case("8 rollouts x 6 turns", 1, 8, 6, 200, 40, 30, target=3.5),
    Case("single turn, 4 groups of 8", 4, 8, 1, 20, 80, 128),
    Case("single turn, 4 groups of 16", 4, 16, 1, 20, 80, 128),
)


def make_batch(case: Case, vocabulary: int) -> Batch:
    dice = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(dice.randrange(1, vocabulary) for _ in range(count))

    rows, system = [], ids(case.system)
    sampling = SamplingParams(max_tokens=case.said)
    for task in range(case.groups):
        question = system + ids(case.read)
        for member in range(case.group):
            context = question
            for _ in range(case.turns):
                said = ids(case.said)
                old = (-6.0,) * len(said)
                rows.append(Row("c", task * case.group + member, context, said, old, sampling))
                context = context + said + ids(case.read)
    count = case.groups * case.group
    return Batch(
        rows=tuple(rows),
        rewards_R=torch.rand(count, generator=torch.Generator().manual_seed(0)).double(),
        group_R=torch.arange(case.groups).repeat_interleave(case.group),
        ids=tuple(RolloutId(1, i // case.group, i % case.group) for i in range(count)),
        sampled_tokens=sum(len(row.completion_ids) for row in rows),
        dropped_tokens={},
        dropped_rollouts={},
    )


def ours(batch: Batch, layout: Any, shape: Shape, device: str, **more: Any) -> Work:
    numbers = {"max_tokens_per_micro_batch": MAX_TOKENS, **more}
    settings = training(total_steps=1000, kl="none", layout=layout, **numbers)
    trainer = PolicyTrainer(shape.model(device), settings)
    return lambda: trainer.ppo_update(trainer.compute_advantages(batch))


def plain(batch: Batch, shape: Shape, device: str, *, as_many_pairs: bool) -> Work:
    """A language model's forward and backward pass over as many tokens as are distinct.

    Args:
        as_many_pairs: In rows so long that as many pairs of tokens attend to each other as in the
            tree, one of them shorter; else in equal ones, about as long as the longest row.
    """
    model = shape.model(device)
    tree = TokenTree.build(batch.rows)
    unique = tree.unique_tokens
    if as_many_pairs:
        wanted = int((tree.depth + 1).sum())
        length = next(n for n in range(1, unique + 1) if causal_pairs(unique, n) >= wanted)
        counts = [(unique // length, length), (1, unique % length)]
        if unique % length < unique / 100:  # not worth a pass of its own: left out, in its favour
            counts.pop()
    else:
        count = math.ceil(unique / max(len(row) for row in batch.rows))
        counts = [(count, math.ceil(unique / count))]
    parts = [
        part.to(device)
        for count, length in counts
        for part in torch.randint(1, shape.vocabulary, (count, length)).split(
            max(1, MAX_TOKENS // length)
        )
    ]

    def work() -> dict[str, float]:
        model.zero_grad(set_to_none=True)
        for part in parts:
            model(input_ids=part, labels=part, use_cache=False).loss.backward()
        return {}

    return work


def causal_pairs(tokens: int, length: int) -> int:
    """Pairs of a token and one up to it in rows of this length, and what is left in a row."""
    full, rest = divmod(tokens, length)
    return full * length * (length + 1) // 2 + rest * (rest + 1) // 2


def trl(batch: Batch, case: Case, shape: Shape, device: str) -> Work:
    """TRL's loss and optimizer on the same rows: prompts padded left, completions right."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {f"w{i}": i for i in range(shape.vocabulary)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), pad_token="w0", eos_token="w0"
    )
    count = len(batch.rows)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=count,
        num_generations=case.group,
        max_completion_length=case.said,
        beta=0.0,
        loss_type="dapo",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=shape.model(device),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w1"}] * count),
    )
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6, weight_decay=0.01)
    prompt = torch.tensor([row.prompt_ids for row in batch.rows], device=device)
    completion = torch.tensor([row.completion_ids for row in batch.rows], device=device)
    rollout = torch.tensor([row.rollout for row in batch.rows])
    inputs: dict[str, Any] = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": batch.rewards_R.float()[rollout].to(device),
        "old_per_token_logps": torch.full(completion.shape, -6.0, device=device),
        "num_items_in_batch": torch.tensor(batch.trained_tokens, device=device),
    }

    def work() -> dict[str, float]:
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {}

    return work


@dataclass
class Cost:
    """Of one way: seconds of each repeat, peak bytes, and the metrics of the last update."""

    taken: list[float]
    peak: int
    metrics: dict[str, float]

    @property
    def seconds(self) -> float:
        return statistics.median(self.taken)


def costs(makers: dict[str, Callable[[], Work]], repeats: int, device: str) -> dict[str, Cost]:
    """On a CPU all are taken in turn, so that other work on the machine meets them alike; on a GPU
    one after the other, so that they need not be there together."""
    if device == "cuda":
        found: dict[str, Cost] = {}
        for name, make in makers.items():
            found |= _costs({name: make()}, repeats, device)
            gc.collect()  # a trainer is in circles
        return found
    return _costs({name: make() for name, make in makers.items()}, repeats, device)


def _costs(works: dict[str, Work], repeats: int, device: str) -> dict[str, Cost]:
    for work in works.values():  # the first time makes the optimizer's state
        work()
    found = {name: Cost([], peak_bytes(work, device), {}) for name, work in works.items()}
    for _ in range(repeats):
        for name, work in works.items():
            _synchronize(device)
            start = time.perf_counter()
            found[name].metrics = work()
            _synchronize(device)
            found[name].taken.append(time.perf_counter() - start)
    return found


def peak_bytes(work: Work, device: str) -> int:
    """Most bytes alive at once in `work`, beyond those from before."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rows_of(shape: Shape, case: Case, batch: Batch, found: dict[str, Cost]) -> list[Result]:
    """What is reported of one case."""
    name = f"{shape.name}: {case.name}"
    tree = found["tree"]

    def against(peer: str, key: str, target: float | None) -> Result:
        seconds = found[key].seconds
        return Result(name, "s/update", tree.seconds, peer, seconds, target, more_is_better=False)

    results = [
        against("padded rows", "padded", case.target),
        against("packed rows", "packed", None),
        against("plain pass over the unique tokens", "plain", round(1 / 1.3, 3)),
        against("plain pass, as many pairs attended", "plain_pairs", None),
    ]
    if "trl" in found:
        results.append(against("TRL GRPOTrainer", "trl", 1.0))
    unique = TokenTree.build(batch.rows).unique_tokens
    padded = found["padded"]
    for metric, tokens in ("unique tokens/s", unique), ("row tokens/s", sum(map(len, batch.rows))):
        speed, peer = tokens / tree.seconds, tokens / padded.seconds
        results.append(Result(name, metric, speed, "padded rows", peer))
    for key in ("padded", "packed", "trl"):
        if key in found:
            peer_value, mib = found[key].peak / 2**20, tree.peak / 2**20
            results.append(Result(name, "peak MiB", mib, key, peer_value, more_is_better=False))
    if "mfu" in tree.metrics:
        wanted = shape.wanted_mfu
        target = None if wanted is None else 1.0
        results.append(Result(name, "MFU", tree.metrics["mfu"], "wanted", wanted or 1.0, target))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(SHAPES), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    arguments = parser.parse_args()
    device: str = arguments.device
    results = []
    for shape in SHAPES[device]:
        for case in CASES:
            batch = make_batch(case, shape.vocabulary)
            makers: dict[str, Callable[[], Work]] = {
                layout: partial(ours, batch, layout, shape, device)
                for layout in ("tree", "packed", "padded")
            }
            makers["plain"] = partial(plain, batch, shape, device, as_many_pairs=False)
            makers["plain_pairs"] = partial(plain, batch, shape, device, as_many_pairs=True)
            if case.turns == 1 and not arguments.no_trl:
                makers["trl"] = partial(trl, batch, case, shape, device)
            results += rows_of(shape, case, batch, costs(makers, arguments.repeats, device))
    name = "train_step" if device == "cpu" else f"train_step_{device}"
    report(name, results, ["torch", "transformers", "trl"])


if __name__ == "__main__":
    main()
