"""Seconds of one whole update: token tree, padded rows, and TRL's GRPOTrainer where it applies.

An update is everything from a batch with rewards to new weights: advantages, log-probs, gradients,
clipping, AdamW; PPO clip, token mean, no KL. Tree and padded rows are the same `PolicyTrainer` with
layouts tree and padded, on the same rows in the same run. The floor is what any training costs: the
model's own forward pass with `labels`, and backward, over as many tokens as are distinct, in rows
of about the length of a rollout; no optimizer, no advantages. TRL (single turn, one row per
completion) gets the same rows in the shape of its own generation's output; its loss
(`GRPOTrainer._compute_loss`), backward pass, clipping and AdamW are timed. The median of the
repeats counts, taken in turn.

    python benchmarks/train_step.py [--repeats 3] [--no-trl]
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _report import Row as Result
from _report import report
from transformers import Qwen3Config, Qwen3ForCausalLM

from tuner.engines.base import SamplingParams
from tuner.traces import RolloutId, TokenTree
from tuner.training import Batch, PolicyTrainer, Row, TrainerSettings
from tuner.training.settings import Layout

VOCABULARY = 397
MAX_TOKENS = 16_384


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


def make_model() -> Qwen3ForCausalLM:
    """Qwen3's shape with 0.8M parameters, the same weights every time."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config).float()
    model.eval()
    return model


def make_batch(case: Case) -> Batch:
    dice = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(dice.randrange(1, VOCABULARY) for _ in range(count))

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


def ours(batch: Batch, *, layout: Layout) -> Callable[[], object]:
    settings = TrainerSettings(
        total_steps=1000,
        kl="none",
        layout=layout,
        max_tokens_per_micro_batch=MAX_TOKENS,
    )
    trainer = PolicyTrainer(make_model(), settings)
    return lambda: trainer.ppo_update(trainer.compute_advantages(batch))


def plain(batch: Batch, case: Case) -> Callable[[], object]:
    """A language model's forward and backward pass over as many tokens as are distinct."""
    model = make_model()
    unique = TokenTree.build(batch.rows).unique_tokens
    count = math.ceil(unique / max(len(row) for row in batch.rows))
    ids = torch.randint(1, VOCABULARY, (count, math.ceil(unique / count)))

    def work() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return work


def trl(batch: Batch, case: Case) -> Callable[[], object]:
    """TRL's loss and optimizer on the same rows: prompts padded left, completions right."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), pad_token="w0", eos_token="w0"
    )
    count = len(batch.rows)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
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
        model=make_model(),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w1"}] * count),
    )
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6, weight_decay=0.01)
    prompt = torch.tensor([row.prompt_ids for row in batch.rows])
    completion = torch.tensor([row.completion_ids for row in batch.rows])
    inputs: dict[str, Any] = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": batch.rewards_R.float()[torch.tensor([row.rollout for row in batch.rows])],
        "old_per_token_logps": torch.full(completion.shape, -6.0),
        "num_items_in_batch": torch.tensor(batch.trained_tokens),
    }

    def work() -> None:
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return work


def seconds(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turn so that other work on the machine meets all alike."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn:  # the first one allocates
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(all_) for name, all_ in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    arguments = parser.parse_args()
    results = []
    for case in CASES:
        batch = make_batch(case)
        unique = TokenTree.build(batch.rows).unique_tokens
        works = {
            "tree": ours(batch, layout="tree"),
            "padded": ours(batch, layout="padded"),
            "plain": plain(batch, case),
        }
        if case.turns == 1 and not arguments.no_trl:
            works["trl"] = trl(batch, case)
        took = seconds(works, arguments.repeats)
        tree = took["tree"]

        def against(
            peer: str,
            key: str,
            target: float | None,
            tree: float = tree,
            case: Case = case,
            took: dict[str, float] = took,
        ) -> Result:
            return Result(
                case.name, "s/update", tree, peer, took[key], target, more_is_better=False
            )

        results.append(against("padded rows", "padded", case.target))
        results.append(against("plain pass over the unique tokens", "plain", round(1 / 1.3, 3)))
        if "trl" in took:
            results.append(against("TRL GRPOTrainer", "trl", 1.0))
        speed = ("unique tokens/s", unique), ("row tokens/s", batch.row_tokens)
        for metric, tokens in speed:
            results.append(
                Result(case.name, metric, tokens / tree, "padded rows", tokens / took["padded"])
            )
    report("train_step", results, ["torch", "transformers", "trl"])


if __name__ == "__main__":
    main()
