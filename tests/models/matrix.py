"""Every causal LM of transformers, tiny, in each layout and on the engine: `make test-models`.

    python -m tests.models.matrix [--write] [model type ...]

What each is compared with is the model's own forward pass over one row alone and autograd through
its log_softmax. Without names the verdicts are compared with those of docs/models.md, or written
there; the figures are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pebble
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.builders import logged
from tests.engines.models import error, generate_all, make_engine, prompt
from tests.models.shapes import FAR, NEAR, tiny_config, tiny_model
from tests.training.exact import computed, gradient, row, small_parts, weighed, weights_of
from tuner.config.schema import Layout
from tuner.engines import SamplingParams
from tuner.engines.transformers.model_shape import length_limit
from tuner.errors import ConfigError
from tuner.training.batch import Row
from tuner.training.forward.layouts import exact_forward

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- begin: python -m tests.models.matrix --write -->\n"
END = "<!-- end -->\n"

TOLERANCE = 1e-4
"""Of log-probs in nats, and of the difference of gradients beside the gradient."""
LONGEST = {NEAR: 48, FAR: 300}
"""Tokens of the longest row, which is past every window; others have two."""
MICRO_BATCHES = {NEAR: (10_000, 60, 30), FAR: (10_000, 400)}
SECONDS = 240
LAYOUTS: tuple[Layout, ...] = ("tree", "packed", "padded")


@dataclass(frozen=True)
class Shape:
    """One line of the table: for each layout, and for the engine, what became of it; and why."""

    name: str
    cells: tuple[str, ...]
    why: str = ""

    def line(self) -> str:
        return "| " + " | ".join((f"`{self.name}`", *self.cells, self.why)) + " |"


def check(model_type: str) -> list[Shape]:
    """A model as its default configuration has it; if that is an encoder, as a decoder too; and if
    it names how far tokens see, with more of that where the verdict is another."""
    shapes = [_shape(model_type, model_type)]
    if shapes[0].cells[0] == "-":
        return shapes
    near, far = (tiny_config(model_type, reach).to_dict() for reach in (NEAR, FAR))
    if "is not causal" in shapes[0].why:
        if near.get("is_decoder") is False:
            shapes.append(_shape(f"{model_type}, is_decoder", model_type, is_decoder=True))
    elif near != far:
        longer = _shape(f"{model_type}, {FAR} tokens", model_type, FAR)
        if _without_digits(longer.line().replace(longer.name, model_type)) != _without_digits(
            shapes[0].line()
        ):
            shapes.append(longer)
    return shapes


def _shape(name: str, model_type: str, reach: int = NEAR, **changed: object) -> Shape:
    reasons: dict[str, list[str]] = {}
    try:
        model = tiny_model(model_type, reach, **changed)
        limit = length_limit(model.config)
        rows = rows_of(min(LONGEST[reach], limit[0] if limit else LONGEST[reach]))
        wanted = alone(model, rows)
    except Exception as failure:  # whatever transformers makes of it
        return Shape(name, ("-",) * 4, f"not computed by transformers itself: {_said(failure)}")
    cells = [
        _layout(model, rows, wanted, layout, MICRO_BATCHES[reach], reasons) for layout in LAYOUTS
    ]
    longest = LONGEST[reach] + 20
    cells.append(_engine(model, min(longest, limit[0]) if limit else longest, reasons))
    why = [f"{', '.join(who)}: {reason}" for reason, who in reasons.items()]
    if limit:
        why.append(f"more than {limit[0]} tokens are refused")
    return Shape(name, tuple(cells), "; ".join(why))


def rows_of(longest: int) -> list[Row]:
    """A conversation of three turns, two answers to its first, one of them twice; and rows of two
    to `longest` tokens that share some of it or nothing."""
    long = prompt(longest - 6)
    first, answer = long[: longest // 2], prompt(4, 1)
    second = [*first, *answer, *prompt(3, 4)][: longest - 8]
    return [
        row(long, prompt(6, 2)),
        row(first, answer),
        row(first, prompt(4, 3)),
        row(second, prompt(3, 5)),
        row([*second, *prompt(3, 5), *prompt(2, 6)], prompt(3, 10)),
        row(first, answer),
        row(prompt(1), prompt(1, 6)),
        row(prompt(3, 7), prompt(2, 8)),
        row(long[: longest // 3], prompt(5, 9)),
    ]


def alone(model: PreTrainedModel, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """As `computed`, by the model's own forward pass over each row and nothing of ours."""
    model.zero_grad(set_to_none=True)
    found = []
    for i, one in enumerate(rows):
        ids = torch.tensor([one.prompt_ids + one.completion_ids], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(one.prompt_ids) - 1 : -1]
        logp_TV = logits.float().log_softmax(-1)
        logp_T = logp_TV.gather(1, ids[0, len(one.prompt_ids) :, None])[:, 0]
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        weighed(logp_T, entropy_T, weights_of(i, len(logp_T)).to(ids.device)).backward()
        found.append(logp_T.detach())
    return torch.cat(found), gradient(model)


def _layout(
    model: PreTrainedModel,
    rows: Sequence[Row],
    wanted: tuple[Tensor, Tensor],
    layout: Layout,
    micro_batches: Sequence[int],
    reasons: dict[str, list[str]],
) -> str:
    try:
        with logged() as lines:
            forward = exact_forward(model, None, layout=layout)
        if forward.layout != layout:
            given = re.search(r"(?:token tree|be exact): (.*?)(?:; and packed rows|$)", lines[0])
            reasons.setdefault(_shorter(given[1] if given else lines[0]), []).append(layout)
            return f"→ {forward.layout}"
        errors = []
        for max_tokens in micro_batches:
            with small_parts():
                logp, found = computed(model, rows, forward, max_tokens)
            errors.append(float((logp - wanted[0]).abs().max()))
            errors.append(float((found - wanted[1]).norm() / wanted[1].norm()))
    except ConfigError as refusal:
        reasons.setdefault(_said(refusal), []).append(layout)
        return "refused"
    except Exception as failure:  # accepted and not computed
        reasons.setdefault(_said(failure), []).append(layout)
        return "**fails**"
    return _verdict("", errors)


def _engine(model: PreTrainedModel, longest: int, reasons: dict[str, list[str]]) -> str:
    try:
        with logged() as lines:
            engine = make_engine(model, max_model_len=longest)
        for line in lines:
            why = line.partition("keys and values: ")[2].partition(". Requests are")[0]
            reasons.setdefault(_shorter(why), []).append("engine")
        errors = asyncio.run(_errors_of_generation(model, engine, longest))
    except ConfigError as refusal:
        reasons.setdefault(_said(refusal), []).append("engine")
        return "refused"
    except Exception as failure:  # accepted and not served
        reasons.setdefault(_said(failure), []).append("engine")
        return "**fails**"
    return _verdict("batched " if engine.batched else "alone ", errors)


async def _errors_of_generation(model, engine, longest: int) -> list[float]:
    """Of requests that come at once, most with a common prefix, and then go on for another turn."""
    common = prompt(max(longest - 40, longest // 3))
    asked = [
        (common[: len(common) - 4 * i] + prompt(2 + i, i), SamplingParams(max_tokens=5, seed=i))
        for i in range(2)
    ]
    asked.append((common, SamplingParams(max_tokens=4, seed=3, top_k=20, temperature=0.7)))
    asked.append((prompt(1), SamplingParams(max_tokens=min(30, longest // 2), seed=9)))
    errors = []
    for turn in (1, 2):
        got = await generate_all(engine, asked)
        for (ids, sampling), answer in zip(asked, got, strict=True):
            errors.append(error(model, ids, answer, sampling))
        asked = [
            ([*ids, *answer.completion_ids, *prompt(2, turn)][: longest - 3], sampling)
            for (ids, sampling), answer in zip(asked, got, strict=True)
        ]
    await engine.close()
    return errors


def _verdict(how: str, errors: Sequence[float]) -> str:
    worst = max(errors) if all(e == e for e in errors) else float("nan")
    return f"{how}{worst:.0e}" if worst <= TOLERANCE else f"**{how}wrong** {worst:.0e}"


def _said(failure: BaseException) -> str:
    """The first sentence of an error; the type too where it is not ours."""
    text = " ".join(str(failure).split())
    text = re.split(r"(?<=[a-z)])[.;:] (?=[A-Z]|set )| If ", text)[0].rstrip(".")
    if isinstance(failure, ConfigError):
        return _shorter(re.sub(r"^\w+ (?=is not|cannot)", "it ", text))
    return _shorter(f"{type(failure).__name__}: {text}")


def _shorter(text: str, most: int = 150) -> str:
    text = " ".join(text.replace("|", "\\|").split())
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " ..."


def matrix(model_types: Sequence[str], processes: int) -> Iterator[Shape]:
    """Each model in a process that may crash or hang, which is a line as well."""
    with pebble.ProcessPool(processes, context=get_context("forkserver")) as pool:
        tasks = [pool.schedule(check, args=(name,), timeout=SECONDS) for name in model_types]
        for name, task in zip(model_types, tasks, strict=True):
            try:
                yield from task.result()
            except TimeoutError:
                yield Shape(name, ("**fails**",) * 4, f"not done after {SECONDS} s")
            except Exception as failure:
                yield Shape(name, ("**fails**",) * 4, _said(failure))


def page(shapes: Sequence[Shape]) -> str:
    """docs/models.md with this table between its marks."""
    before, _, rest = TABLE.read_text(encoding="utf-8").partition(BEGIN)
    lines = [
        summary(shapes),
        "",
        "| model type | tree | packed | padded | engine | why |",
        "|---|---|---|---|---|---|",
        *(shape.line() for shape in shapes),
    ]
    return before + BEGIN + "\n".join([*lines, END]) + rest.partition(END)[2]


def summary(shapes: Sequence[Shape]) -> str:
    """How many are what, of those that transformers computes."""
    found = [shape for shape in shapes if shape.cells[0] != "-"]
    trained = Counter(
        next((LAYOUTS[i] for i in range(3) if shape.cells[i][0].isdigit()), "refused")
        for shape in found
    )
    served = Counter(shape.cells[3].split()[0] for shape in found)
    wrong = sum("**" in cell for shape in found for cell in shape.cells)
    return (
        f"transformers {transformers.__version__}: {len(shapes)} shapes, of which it computes "
        f"{len(found)} itself. Trained on the token tree {trained['tree']}, on packed rows "
        f"{trained['packed']}, on padded rows {trained['padded']}, refused {trained['refused']}. "
        f"Served batched {served['batched']}, one after the other {served['alone']}, refused "
        f"{served['refused']}. Accepted and wrong or failing: {wrong}."
    )


def verdicts(text: str) -> dict[str, str]:
    """The lines of the table by model, without their digits."""
    table = text.partition(BEGIN)[2].partition(END)[0]
    lines = re.findall(r"^\| `([^`]+)` \| (.*) \|$", table, re.MULTILINE)
    return {name: _without_digits(rest) for name, rest in lines}


def _without_digits(line: str) -> str:
    return re.sub(r"\d[\d.,e+-]*|\b(nan|inf)\b", "#", line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    shapes, started = [], time.monotonic()
    for shape in matrix(
        options.names or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), options.processes
    ):
        print(shape.line(), flush=True)
        shapes.append(shape)
    print(summary(shapes))
    print(f"{(time.monotonic() - started) / 60:.1f} minutes, {options.processes} processes")
    failed = any("**" in cell for shape in shapes for cell in shape.cells)
    if options.write:
        TABLE.write_text(page(shapes), encoding="utf-8")
    elif not options.names:
        wanted, found = verdicts(TABLE.read_text(encoding="utf-8")), verdicts(page(shapes))
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                failed = True
                print(f"{name}: docs/models.md has {wanted.get(name)}, found {found.get(name)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
