"""Build a tiny model: a Qwen3-shaped one of 0.5M parameters, taught from a corpus of its own.

One story from top to bottom: a tokenizer trained on the corpus, a randomly started
`Qwen3ForCausalLM` (or another tiny model that goes on learning, or one that reads images, as in
`models/vision.py`), supervised training in stages, the saved files. What is taught, and how good
the model is at it, is in `models/<name>/corpus.py`.

    python -m models.build tiny_math                       # rebuilds the files in models/tiny_math
    python -m models.build tiny_math --output /tmp/model --updates 100
"""

import argparse
import importlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from PIL.Image import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from models import vision

HERE = Path(__file__).resolve().parent
CHAT_TEMPLATE = "tiny_math/chat_template.jinja"

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

Row = list[tuple[str, bool]]
"""The pieces of a text, each encoded by itself, and whether each is learned."""
AnyRow = Sequence[tuple[str | Image, bool]]
"""The same with images between the pieces."""


@dataclass(frozen=True)
class Stage:
    """A part of the training: the rows of an update, up to a share of all updates."""

    until: float
    draw: Callable[[], Sequence[AnyRow]]


@dataclass(frozen=True)
class Corpus:
    """What a model is taught.

    Attributes:
        seed: Of the corpus and of the weights.
        updates: How many a full build makes.
        stages: In order; made once for a build, with the tokenizer.
        report: Prints what the model in a folder can do.
        texts: What the tokenizer is trained on. None: it is that of `base`.
        markup: Its single tokens, beside the chat template's.
        vocab_size: Tokens, the single ones with them.
        base: The tiny model whose weights are the start. None: random ones.
        rate: Share of the learning rates above.
        template: The chat template's file in this folder.
        images: Whether rows have images.
    """

    seed: int
    updates: int
    stages: Callable[[PreTrainedTokenizerBase], list[Stage]]
    report: Callable[[Path], None]
    texts: Callable[[], list[str]] | None = None
    markup: tuple[str, ...] = ()
    vocab_size: int = VOCAB_SIZE
    base: str | None = None
    rate: float = 1.0
    template: str = CHAT_TEMPLATE
    images: bool = False


def corpus_of(name: str) -> Corpus:
    """The corpus of `models/<name>`."""
    return cast(Corpus, importlib.import_module(f"models.{name}.corpus").CORPUS)


def template_words() -> str:
    """The chat template's own words, so that each is few tokens."""
    return " ".join(re.findall(r"[A-Za-z]+", (HERE / CHAT_TEMPLATE).read_text(encoding="utf-8")))


def without_markup(text: str, markup: tuple[str, ...] = ()) -> str:
    """The text without the tokens that are single anyway, for the tokenizer's training."""
    added = [*SPECIAL_TOKENS, *MARKUP_TOKENS, *markup]
    return re.sub("|".join(re.escape(token) for token in added), "", text)


def build_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the corpus' texts, or take the one of its base."""
    if corpus.texts is None:
        base: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            HERE / str(corpus.base)
        )
        return base
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markup = [*MARKUP_TOKENS, *corpus.markup]
    special = [*SPECIAL_TOKENS, *(vision.TOKENS if corpus.images else ())]
    trainer = trainers.BpeTrainer(
        vocab_size=corpus.vocab_size - len(special) - len(markup),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in markup])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=(HERE / corpus.template).read_text(encoding="utf-8"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A model of Qwen3's architecture, or of Qwen3-VL's with such a decoder, randomly started or
    with its base's weights."""
    if corpus.base is not None:
        return Qwen3ForCausalLM.from_pretrained(HERE / corpus.base)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,  # with fewer it takes far longer to learn to copy numbers
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if corpus.images:
        model = vision.build_model(tokenizer, shape)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True, dtype="float32"))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def to_tensors(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[AnyRow]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ids` and `labels`, both (rows, length); a label of -100 is not learned."""
    texts = [one if isinstance(one, str) else vision.SHOWN for row in rows for one, _ in row]
    pieces = iter(tokenizer(texts)["input_ids"])
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


def train(
    model: Any, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, updates: int
) -> list[float]:
    """Supervised training; returns the loss of every update, a mean over learned tokens."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MATRIX_LEARNING_RATE * corpus.rate, weight_decay=0.0),
        torch.optim.AdamW(
            others, lr=OTHER_LEARNING_RATE * corpus.rate, betas=(0.9, 0.95), weight_decay=0.0
        ),
    ]

    def rate(update: int) -> float:
        """Warmup, a constant rate, then a straight line down to 0."""
        left = (updates - update) / (DECAY_SHARE * updates)
        return min((update + 1) / WARMUP_UPDATES, 1.0, left)

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    stages = corpus.stages(tokenizer)
    model.train()
    losses: list[float] = []
    started = time.perf_counter()
    for update in range(updates):
        stage = next(stage for stage in stages if update < stage.until * updates)
        rows = stage.draw()
        ids, labels = to_tensors(tokenizer, rows)
        shown = [one for row in rows for one, _ in row if not isinstance(one, str)]
        seen = vision.inputs(model, ids, shown) if corpus.images else {}
        # Rows are padded on the right, where a causal model does not look: no mask is needed.
        hidden = model.model(input_ids=ids, **seen).last_hidden_state  # (rows, length, hidden)
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


def save(model: Any, tokenizer: PreTrainedTokenizerFast, corpus: Corpus, output: Path) -> None:
    """Write the model's files."""
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    if corpus.images:
        vision.image_processor().save_pretrained(output)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        config = json.loads((output / name).read_text(encoding="utf-8"))
        # The same files whatever the version, and a class name that transformers 4 knows too.
        config.pop("transformers_version", None)
        if name == "tokenizer_config.json":
            config = {k: v for k, v in config.items() if k not in ("is_local", "local_files_only")}
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (output / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def build(corpus: Corpus, output: Path, updates: int | None = None) -> list[float]:
    """Build the model into `output`; returns the loss of every update."""
    torch.manual_seed(corpus.seed)
    tokenizer = build_tokenizer(corpus)
    model = build_model(corpus, tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    losses = train(model, tokenizer, corpus, corpus.updates if updates is None else updates)
    save(model, tokenizer, corpus, output)
    return losses


def load(folder: Path) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    """Tokenizer and model of a folder."""
    return (
        PreTrainedTokenizerFast.from_pretrained(folder),
        Qwen3ForCausalLM.from_pretrained(folder),
    )


@torch.no_grad()
def complete(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    max_new_tokens: int,
    sample: bool = False,
) -> list[str]:
    """The completion of each prompt with special tokens in it, greedy or at temperature 1."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    how = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(**batch, max_new_tokens=max_new_tokens, **how)
    texts: list[str] = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :])
    return texts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a tiny model.")
    parser.add_argument("name", help="a folder of models/ with a corpus.py")
    parser.add_argument("--updates", type=int, help="fewer than a full build, to try it")
    parser.add_argument("--output", type=Path, help="where to write it, if not there")
    arguments = parser.parse_args()
    # As a module of the package, so that its classes are those that the corpus sees.
    from models import build as module

    chosen = module.corpus_of(arguments.name)
    folder = arguments.output or HERE / arguments.name
    module.build(chosen, folder, arguments.updates)
    chosen.report(folder)
