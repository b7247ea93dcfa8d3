"""Build `tiny_math`: a Qwen3-shaped model of 0.5M parameters that answers easy word problems.

One story from top to bottom: a tokenizer trained on the problems, a randomly started
`Qwen3ForCausalLM`, supervised training in stages, the saved files, the measured accuracy.

The supervision ends with a mixture of two styles of answering, both in the shape of a Qwen3 turn:

    terse     <think>\\n\\n</think>\\n\\nThe answer is 37.<|im_end|>
    worked    <think>\\n4 * 6 = 24\\n24 + 13 = 37\\n</think>\\n\\nThe answer is 37.<|im_end|>

In a model this small the terse one is nearly always wrong and the worked one nearly always right.
That is on purpose: reinforcement learning has something to find. Which style is likelier depends on
the problem, so that the start is between the two: see `worked_share`.

Supervised problems are drawn from the same distribution as those of `examples/gsm8k/data`, but none
of them has a question that occurs there, neither held out nor for RL.

    python models/tiny_math/build.py                       # rebuilds the files next to this script
    python models/tiny_math/build.py --output /tmp/model --updates 100
"""

import argparse
import importlib.util
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).resolve().parent
CHAT_TEMPLATE = HERE / "chat_template.jinja"
SYSTEM_PROMPT = "You are a helpful math problem solving agent."

SEED = 7
UPDATES = 1000
DRILLS_PER_ROW = 12
MATRIX_LEARNING_RATE = 0.02  # Muon
OTHER_LEARNING_RATE = 3e-3  # AdamW: embeddings and norms
WARMUP_UPDATES = 20
DECAY_SHARE = 0.4
CONTEXT = 4096
VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# As in Qwen3 these are single tokens but stay in the text when special tokens are skipped.
MARKUP_TOKENS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
# Qwen's split with one more alternative in front: an operator with its spaces is one token.
SPLIT = (
    r" [+\-*/=] "
    r"|(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def _load_make_data() -> ModuleType:
    """The example's data generator, which is a script and not part of a package."""
    path = HERE.parents[1] / "examples" / "gsm8k" / "make_data.py"
    spec = importlib.util.spec_from_file_location("gsm8k_make_data", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_data = _load_make_data()


def terse_answer(problem: Any) -> str:
    return f"<think>\n\n</think>\n\nThe answer is {problem.answer}.<|im_end|>"


def worked_answer(problem: Any) -> str:
    work = "\n".join(step.equation() for step in problem.steps)
    return f"<think>\n{work}\n</think>\n\nThe answer is {problem.answer}.<|im_end|>"


def worked_share(problem: Any) -> float:
    """How often a problem is worked: mostly if it begins with boxes or packs, else seldom."""
    return 0.75 if problem.steps[0].op == "*" else 0.30


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on problems, the system prompt and the chat template's own words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = SPECIAL_TOKENS + MARKUP_TOKENS
    markup = re.compile("|".join(re.escape(token) for token in added))
    template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    texts = [" ".join(re.findall(r"[A-Za-z]+", template))] * 100
    for problem in islice(make_data.problems(SEED), 5000):
        # The words around the question are in every prompt, so they count as often as it does.
        texts += [SYSTEM_PROMPT, "system", "user", "assistant"]
        texts += [problem.question, markup.sub("", worked_answer(problem))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A randomly started model of Qwen3's architecture."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,  # with fewer it takes far longer to learn to copy numbers
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def render_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The text of the prompt that the example's ReAct agent sends for a question."""
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


Row = list[tuple[str, bool]]
"""The pieces of a text, and whether each is learned."""


class Rows:
    """Supervised rows, drawn without end from problems that are in no shipped split."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        shipped = {p.question for split in make_data.make_splits().values() for p in split}
        self.problems: Iterator[Any] = make_data.problems(SEED, exclude=shipped)
        self.rng = random.Random(SEED)
        self.frame = render_prompt(tokenizer, "{question}")

    def drills(self, count: int) -> list[Row]:
        """Equations without problems, as many of each operation; learned are the results."""
        rows = []
        for _ in range(count):
            row = [("<think>\n", False)]
            for op in self.rng.choices("+-*/", k=DRILLS_PER_ROW):
                steps = (step for problem in self.problems for step in problem.steps)
                step = next(step for step in steps if step.op == op)
                row += [(f"{step.left} {op} {step.right} = ", False), (f"{step.result}\n", True)]
            rows.append(row)
        return rows

    def one_step(self, count: int) -> list[Row]:
        """Problems of one step without the chat around them: short rows to learn copying on."""
        problems = (problem for problem in self.problems if len(problem.steps) == 1)
        return [
            [(problem.question, False), (worked_answer(problem), True)]
            for problem in islice(problems, count)
        ]

    def answers(self, count: int, worked_share: Callable[[Any], float]) -> list[Row]:
        """Prompts as the agent sends them, with an answer in one of the two styles."""
        rows: list[Row] = []
        for problem in islice(self.problems, count):
            worked = self.rng.random() < worked_share(problem)
            answer = worked_answer(problem) if worked else terse_answer(problem)
            prompt = self.frame.replace("{question}", problem.question)
            rows.append([(prompt, False), (answer, True)])
        return rows


def to_tensors(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ids` and `labels`, both (rows, length); a label of -100 is not learned."""
    pieces = iter(tokenizer([text for row in rows for text, _ in row])["input_ids"])
    all_ids, all_labels = [], []
    for row in rows:
        ids: list[int] = []
        labels: list[int] = []
        for _, learned in row:
            piece = next(pieces)
            ids += piece
            labels += piece if learned else [-100] * len(piece)
        all_ids.append(torch.tensor(ids))
        all_labels.append(torch.tensor(labels))
    return (
        pad_sequence(all_ids, True, float(tokenizer.pad_token_id)),
        pad_sequence(all_labels, True, -100.0),
    )


@dataclass(frozen=True)
class Stage:
    """A part of the training: its rows, up to a share of all updates."""

    until: float
    draw: Callable[[Rows], list[Row]]


# Arithmetic first, then copying numbers out of a text, then the two together: taught at once they
# take several times as long. A few drills stay in for the operations that are rare in problems.
STAGES = [
    Stage(0.13, lambda rows: rows.drills(32)),
    Stage(0.27, lambda rows: rows.one_step(32)),
    Stage(0.65, lambda rows: rows.answers(28, lambda problem: 1.0) + rows.drills(4)),
    Stage(1.00, lambda rows: rows.answers(28, worked_share) + rows.drills(4)),
]


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, updates: int) -> list[float]:
    """Supervised training; returns the loss of every update, a mean over learned tokens."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE, weight_decay=0.0),
        torch.optim.AdamW(others, lr=OTHER_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def rate(update: int) -> float:
        """Warmup, a constant rate, then a straight line down to 0."""
        left = (updates - update) / (DECAY_SHARE * updates)
        return min((update + 1) / WARMUP_UPDATES, 1.0, left)

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    rows = Rows(tokenizer)
    model.train()
    losses: list[float] = []
    started = time.perf_counter()
    for update in range(updates):
        stage = next(stage for stage in STAGES if update < stage.until * updates)
        ids, labels = to_tensors(tokenizer, stage.draw(rows))
        # Rows are padded on the right, where a causal model does not look: no mask is needed.
        hidden = model.model(input_ids=ids).last_hidden_state  # (rows, length, hidden)
        learned = labels[:, 1:] != -100
        logits = model.lm_head(hidden[:, :-1][learned])  # (learned tokens, vocabulary)
        loss = F.cross_entropy(logits, labels[:, 1:][learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.item())
        if (update + 1) % 25 == 0:
            mean = sum(losses[-25:]) / 25
            seconds = time.perf_counter() - started
            print(f"update {update + 1}: loss {mean:.3f}, {seconds:.0f} s", flush=True)
    model.eval()
    return losses


def final_number(completion: str) -> int | None:
    """The last number after the thinking; None if there is none or the answer was cut off."""
    answer, ended, _ = completion.partition("<|im_end|>")
    numbers = re.findall(r"\d+", answer.rpartition("</think>")[2])
    return int(numbers[-1]) if ended and numbers else None


@torch.no_grad()
def accuracy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Any],
    *,
    answer_start: str = "",
    sample: bool = False,
) -> float:
    """The share of problems answered rightly, greedily or sampled at temperature 1.

    `answer_start` is put into the model's mouth.
    """
    prompts = [render_prompt(tokenizer, problem.question) + answer_start for problem in problems]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    how = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(**batch, max_new_tokens=96, **how)
    completions = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :])
    right: int = sum(
        final_number(answer_start + completion) == problem.answer
        for completion, problem in zip(completions, problems, strict=True)
    )
    return right / len(problems)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model's files."""
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        config = json.loads((output / name).read_text(encoding="utf-8"))
        # The same files whatever the version, and a class name that transformers 4 knows too.
        config.pop("transformers_version", None)
        if name == "tokenizer_config.json":
            config = {k: v for k, v in config.items() if k not in ("is_local", "local_files_only")}
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (output / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def build(output: Path, updates: int = UPDATES) -> list[float]:
    """Build the model into `output`; returns the loss of every update."""
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    losses = train(model, tokenizer, updates)
    save(model, tokenizer, output)
    return losses


def report(folder: Path) -> None:
    """Print the accuracy of a saved model on the held-out problems."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder)
    problems = make_data.make_splits()["test"]
    print(f"held-out accuracy, greedy: {accuracy(model, tokenizer, problems):.3f}")
    print(f"held-out accuracy, sampled: {accuracy(model, tokenizer, problems, sample=True):.3f}")
    for style, start in {"terse": "<think>\n\n</think>", "worked": "<think>\n"}.items():
        value = accuracy(model, tokenizer, problems, answer_start=start)
        print(f"held-out accuracy, greedy, made to answer in the {style} style: {value:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the tiny_math model.")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    build(arguments.output, arguments.updates)
    report(arguments.output)
